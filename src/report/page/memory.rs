//! The chart of an allocator's memory: every block that it gives out, and what it holds.

use super::{Blocks, Chart, Course, Label};
use crate::sim::allocator::replay::Replay;
use crate::sim::requests::Request;
use crate::units::Bytes;

/// Follows a replay, request by request.
#[derive(Clone, Debug)]
pub struct Memory {
    course: Course,
    blocks: Blocks,
    /// Bytes of each layer, and after them what is reserved.
    now: Vec<u64>,
    allocated: Bytes,
}

impl Memory {
    /// Before the first request, with the names of the layers in which blocks are drawn.
    #[must_use]
    pub fn new(layers: &[&str]) -> Self {
        Self {
            course: Course::new("allocated", layers, &["reserved"]),
            blocks: Blocks::default(),
            now: vec![0; layers.len() + 1],
            allocated: Bytes::ZERO,
        }
    }

    /// Follows a request that `replay` has just answered at a position, which is at least that of
    /// the request before. `what` says of a block with these bytes to which layer it belongs, and
    /// what is known of it.
    pub fn follow(
        &mut self,
        at: u64,
        request: Request,
        replay: &Replay,
        what: impl FnOnce(Bytes) -> (usize, Label),
    ) {
        let stats = replay.allocator().stats();
        match request {
            Request::Allocate { id, .. } if stats.allocated > self.allocated => {
                let bytes = stats.allocated - self.allocated;
                let (layer, label) = what(bytes);
                let layer = layer.min(self.now.len().saturating_sub(2));
                self.blocks.begin(id, at, bytes, layer, label);
                self.now[layer] += bytes.0;
            }
            Request::Free { id } => {
                if let Some((layer, bytes)) = self.blocks.end(id, at) {
                    self.now[layer] -= bytes.0;
                }
            }
            _ => {}
        }
        self.allocated = stats.allocated;
        if let Some(reserved) = self.now.last_mut() {
            *reserved = stats.reserved.0;
        }
        self.course.add(at, &self.now);
    }

    /// The chart, up to `end`; its axis, marks and limits are for the caller to set.
    #[must_use]
    pub fn chart(mut self, name: &str, end: u64) -> Chart {
        self.course.end_at(end);
        Chart {
            name: name.to_owned(),
            course: self.course,
            blocks: Some(self.blocks),
            ..Chart::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::allocator::Config;
    use crate::sim::allocator::replay::LARGEST_DEVICE;
    use serde_json::json;

    #[test]
    fn layers_add_up_to_what_is_allocated() {
        let requests = [
            Request::Allocate { id: 0, bytes: Bytes(100), stream: 0 },
            Request::Allocate { id: 1, bytes: Bytes(11_000_000), stream: 0 },
            Request::Free { id: 0 },
            Request::Free { id: 5 },
        ];
        let mut replay = Replay::new(&Config::default(), LARGEST_DEVICE, None);
        let mut memory = Memory::new(&["small", "large"]);
        for (at, &request) in requests.iter().enumerate() {
            replay.step(request);
            memory.follow(at as u64, request, &replay, |bytes| {
                (usize::from(bytes.0 > 1024), Label::default())
            });
        }
        let chart = serde_json::to_value(memory.chart("memory", 4)).unwrap();
        let large = 11_000_320;
        assert_eq!(
            chart["levels"][0]["values"],
            json!([[512, 0, -512, 0], [0, large, 0, 0], [2 << 20, 12 << 20, 0, 0]])
        );
        assert_eq!(chart["blocks"]["bytes"], json!([512, large]));
        assert_eq!(
            chart["peaks"][0],
            json!({ "name": "allocated", "at": 1, "value": large + 512 })
        );
    }
}
