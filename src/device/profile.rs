//! A device as the planner sees it: memory, peak rates, link, overheads.
//!
//! Its file form (`*.device.json`) is this type's own serialisation. Not for: figures of particular
//! devices ([`super::builtin`]).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::job::Dtype;
use crate::units::Bytes;

/// Peak arithmetic rates, in floating-point operations a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Single precision, without TF32.
    pub f32: u64,
    /// Half precision (f16 and bf16) on whatever unit is fastest.
    pub f16: u64,
    /// Double precision.
    pub f64: u64,
}

/// The host–device link, in bytes a second for one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Host to device, alone.
    pub h2d: u64,
    /// Device to host, alone.
    pub d2h: u64,
    /// Host to device while the other direction is busy too.
    pub h2d_contended: u64,
    /// Device to host while the other direction is busy too.
    pub d2h_contended: u64,
    /// Submitting one copy, in nanoseconds.
    pub overhead_ns: u64,
}

/// A device. All rates are at least 1; [`Profile::validate`] checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What users call it.
    pub name: String,
    /// Where its figures are from.
    pub source: String,
    /// All of its memory.
    pub memory_bytes: Bytes,
    /// What the context takes before a job gets any; outside every budget.
    pub reserve_bytes: Bytes,
    /// Peak arithmetic rates.
    pub flops: Rates,
    /// Memory bandwidth in bytes a second.
    pub memory_bandwidth: u64,
    /// The share of the peak rates that a real operator reaches, in percent.
    pub efficiency_percent: u32,
    /// The link.
    pub link: Link,
    /// Launching one kernel, in nanoseconds.
    pub launch_overhead_ns: u64,
    /// How much pinned host memory may be used.
    pub pinned_bytes: Bytes,
}

impl Profile {
    /// What a job can have: memory without the context's reserve.
    #[must_use]
    pub const fn available(&self) -> Bytes {
        self.memory_bytes.saturating_sub(self.reserve_bytes)
    }

    /// The peak rate for elements of `dtype`.
    #[must_use]
    pub const fn rate(&self, dtype: Dtype) -> u64 {
        match dtype {
            Dtype::F16 | Dtype::Bf16 => self.flops.f16,
            Dtype::F64 | Dtype::C128 => self.flops.f64,
            _ => self.flops.f32,
        }
    }

    /// Checks that every figure is possible.
    ///
    /// # Errors
    /// One sentence naming the key at fault and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        let positive = [
            ("memory_bytes", self.memory_bytes.0),
            ("flops.f32", self.flops.f32),
            ("flops.f16", self.flops.f16),
            ("flops.f64", self.flops.f64),
            ("memory_bandwidth", self.memory_bandwidth),
            ("efficiency_percent", u64::from(self.efficiency_percent)),
            ("link.h2d", self.link.h2d),
            ("link.d2h", self.link.d2h),
            ("link.h2d_contended", self.link.h2d_contended),
            ("link.d2h_contended", self.link.d2h_contended),
        ];
        for (key, value) in positive {
            if value == 0 || value > 1 << 60 {
                return Err(format!("`{key}` is {value}; it must be from 1 to 2^60"));
            }
        }
        for (key, value) in [("link.overhead_ns", self.link.overhead_ns), ("launch_overhead_ns", self.launch_overhead_ns)] {
            if value > 1_000_000_000 {
                return Err(format!("`{key}` is {value}; an overhead above a second is not credible"));
            }
        }
        if self.link.h2d_contended > self.link.h2d || self.link.d2h_contended > self.link.d2h {
            return Err("`link`: a direction can't be faster contended than alone".to_owned());
        }
        if self.efficiency_percent > 100 {
            return Err(format!("`efficiency_percent` is {}; it must be from 1 to 100", self.efficiency_percent));
        }
        if self.reserve_bytes >= self.memory_bytes {
            return Err("`reserve_bytes` leaves no memory".to_owned());
        }
        if self.pinned_bytes.0 > 1 << 60 {
            return Err("`pinned_bytes` must be at most 2^60".to_owned());
        }
        Ok(())
    }
}
