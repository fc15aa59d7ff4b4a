//! The strings that have a meaning in a memory snapshot. All others are dropped while reading.

/// A string that has a meaning in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// A power of two, by its exponent: the keys of `roundup_power2_divisions`.
    Power(u8),
    // The snapshot's own keys.
    DeviceTraces,
    Segments,
    AllocatorSettings,
    // Keys of a recorded event.
    Action,
    Addr,
    Size,
    Stream,
    DeviceFree,
    Frames,
    PoolId,
    // Actions.
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    Oom,
    Taken,
    // Keys of a segment and of its blocks; states of a block.
    Address,
    TotalSize,
    Device,
    Blocks,
    RequestedSize,
    State,
    SegmentPoolId,
    ActiveAllocated,
    ActivePendingFree,
    Inactive,
    // Parts of a stack frame, and of that of `torch.cuda.empty_cache`.
    Name,
    Filename,
    Line,
    EmptyCache,
    MemoryPy,
    // Keys of the settings. Python keeps one empty string, so an empty configuration is often a
    // shared string.
    Empty,
    Conf,
    MaxSplitSize,
    GcThreshold,
    ExpandableSegments,
    RoundupPower2,
}

impl Word {
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        Some(match text {
            b"device_traces" => Self::DeviceTraces,
            b"segments" => Self::Segments,
            b"allocator_settings" => Self::AllocatorSettings,
            b"action" => Self::Action,
            b"addr" => Self::Addr,
            b"size" => Self::Size,
            b"stream" => Self::Stream,
            b"device_free" => Self::DeviceFree,
            b"frames" => Self::Frames,
            b"pool_id" => Self::PoolId,
            b"alloc" => Self::Alloc,
            b"free_requested" => Self::FreeRequested,
            b"free_completed" => Self::FreeCompleted,
            b"segment_alloc" => Self::SegmentAlloc,
            b"segment_free" => Self::SegmentFree,
            b"segment_map" => Self::SegmentMap,
            b"segment_unmap" => Self::SegmentUnmap,
            b"oom" => Self::Oom,
            b"snapshot" => Self::Taken,
            b"address" => Self::Address,
            b"total_size" => Self::TotalSize,
            b"device" => Self::Device,
            b"blocks" => Self::Blocks,
            b"requested_size" => Self::RequestedSize,
            b"state" => Self::State,
            b"segment_pool_id" => Self::SegmentPoolId,
            b"active_allocated" => Self::ActiveAllocated,
            b"active_pending_free" | b"active_awaiting_free" => Self::ActivePendingFree,
            b"inactive" => Self::Inactive,
            b"name" => Self::Name,
            b"filename" => Self::Filename,
            b"line" => Self::Line,
            b"empty_cache" => Self::EmptyCache,
            b"" => Self::Empty,
            b"PYTORCH_CUDA_ALLOC_CONF" | b"PYTORCH_ALLOC_CONF" => Self::Conf,
            b"max_split_size" => Self::MaxSplitSize,
            b"garbage_collection_threshold" => Self::GcThreshold,
            b"expandable_segments" => Self::ExpandableSegments,
            b"roundup_power2_divisions" => Self::RoundupPower2,
            _ if text.ends_with(b"torch/cuda/memory.py") => Self::MemoryPy,
            [b'0'..=b'9', ..] => {
                let n: u32 = std::str::from_utf8(text).ok()?.parse().ok()?;
                if !n.is_power_of_two() {
                    return None;
                }
                Self::Power(n.trailing_zeros().try_into().ok()?)
            }
            _ => return None,
        })
    }
}
