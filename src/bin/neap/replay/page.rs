//! A replay as a page: every block, by size, with the line that a snapshot has of it.

use std::path::Path;

use neap::report::page::{Across, Label, Limit, Memory, Page, View};
use neap::sim::allocator::replay::Replay;
use neap::sim::requests::Request;
use neap::sim::snapshot::AllocatedAt;
use serde_json::Value;

use super::Target;
use crate::output;

/// The layers, each with the bytes from which on a block belongs to it.
const LAYERS: [(&str, u64); 5] = [
    ("blocks from 256 MiB", 256 << 20),
    ("from 32 MiB", 32 << 20),
    ("from 4 MiB", 4 << 20),
    ("from 512 KiB", 512 << 10),
    ("smaller", 0),
];

/// What a page needs of a replay.
pub struct Seen {
    memory: Memory,
    count: u64,
    lines: AllocatedAt,
}

impl Seen {
    /// `lines` are those that a snapshot has.
    pub fn new(lines: AllocatedAt) -> Self {
        Self { memory: Memory::new(&LAYERS.map(|l| l.0)), count: 0, lines }
    }

    /// Follows one request that was answered.
    pub fn follow(&mut self, request: Request, replay: &Replay) {
        self.memory.follow(self.count, request, replay, |bytes| {
            let layer = LAYERS.iter().position(|l| bytes.0 >= l.1).unwrap_or_default();
            let line = match request {
                Request::Allocate { id, .. } => self.lines.line(id).unwrap_or_default().to_owned(),
                _ => String::new(),
            };
            (layer, Label { line, ..Label::default() })
        });
        self.count += 1;
    }

    /// Writes the page.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn write(
        self,
        to: &Path,
        events: &Path,
        target: Option<&Target>,
        report: Value,
    ) -> anyhow::Result<()> {
        let mut chart = self.memory.chart("Memory after each request", self.count);
        chart.across = Across::Requests;
        let limit = |t: &Target| Limit { name: t.name.clone(), value: t.capacity.0 };
        chart.limits = target.map(limit).into_iter().collect();
        let view = View {
            name: "memory over time".to_owned(),
            about: "What the allocator gave out, block by block, and what it held of the device."
                .to_owned(),
            charts: vec![chart],
            ..View::default()
        };
        let title = events.file_name().map(|n| n.to_string_lossy().into_owned());
        let page = Page {
            title: title.unwrap_or_default(),
            command: "neap replay",
            report,
            views: vec![view],
            ..Page::default()
        };
        output::page(to, &page)
    }
}
