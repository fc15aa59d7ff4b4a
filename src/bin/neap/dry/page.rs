//! The run as a page: every block over the run, and the devices that it fits.

use std::path::Path;

use neap::report::page::{Across, Kind, Label, Limit, Mark, Memory, Page, Table, View};
use neap::sim::allocator::replay::{LARGEST_DEVICE, Replay};
use neap::sim::requests::Request;
use serde_json::Value;

use super::events::{Allocations, Event};
use super::found::{Block, Process};
use crate::output;

/// What a page shows.
pub struct Shown<'a> {
    pub title: String,
    pub process: &'a Process,
    pub events: &'a [Event],
    pub allocations: &'a Allocations,
    pub limit: Limit,
    pub fits: Table,
    pub report: Value,
}

impl Shown<'_> {
    /// Writes the page.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn write(self, to: &Path) -> anyhow::Result<()> {
        let mut views = vec![self.memory()];
        if !self.fits.rows.is_empty() {
            views.push(View {
                name: "where it fits".to_owned(),
                about: "What is known of each built-in device, the smallest first. What is \
                        reserved is known where a run or a replay reached its end."
                    .to_owned(),
                tables: vec![self.fits],
                ..View::default()
            });
        }
        let page = Page {
            title: self.title,
            command: "neap dry",
            report: self.report,
            views,
            ..Page::default()
        };
        output::page(to, &page)
    }

    /// Memory over the run on the device that reserved most.
    fn memory(&self) -> View {
        let Self { process, events, allocations, .. } = self;
        let device = process.main_device();
        let names: Vec<String> =
            allocations.categories.iter().map(|c| c.replace('_', " ")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let other = names.len().saturating_sub(1);
        let mut memory = Memory::new(&names);
        let mut replay = Replay::new(&process.allocator_settings(), LARGEST_DEVICE, None);
        for (at, event) in events.iter().enumerate() {
            if event.device != device && event.request != Request::EmptyCache {
                continue;
            }
            replay.step(event.request);
            memory.follow(at as u64, event.request, &replay, |_| match event.request {
                Request::Allocate { id, .. } => {
                    (allocations.category(id).unwrap_or(other), self.label(id))
                }
                _ => (other, Label::default()),
            });
        }
        let mut chart = memory.chart("Memory after each request", events.len() as u64);
        chart.across = Across::Requests;
        chart.limits = vec![self.limit.clone()];
        chart.marks = marks(process);
        let tables = largest(process);
        let about = if self.events.is_empty() {
            "PyTorch kept no history of its allocator, so there is nothing to draw."
        } else {
            "What PyTorch's allocator gave out, by what it holds, and what it reserved; of several \
             devices on that which reserved most."
        };
        View {
            name: "memory over time".to_owned(),
            about: about.to_owned(),
            charts: if self.events.is_empty() { Vec::new() } else { vec![chart] },
            tables,
        }
    }

    fn label(&self, id: u32) -> Label {
        let place = self.allocations.place(id);
        let text = |part: Option<&String>| part.cloned().unwrap_or_default();
        Label {
            name: self.allocations.name(id).unwrap_or_default().to_owned(),
            module: text(place.and_then(|p| p.module.as_ref())),
            line: text(place.and_then(|p| p.line.as_ref())),
        }
    }
}

/// Where steps and their phases begin. Before the first step scripts make what they train.
fn marks(process: &Process) -> Vec<Mark> {
    let mut all = Vec::new();
    let mut step = None;
    for mark in &process.marks {
        if mark.phase == "forward" && step.is_none_or(|step| step < mark.step) {
            step = Some(mark.step);
            all.push(Mark { at: mark.event, name: format!("step {}", mark.step), step: true });
        }
        all.push(Mark { at: mark.event, name: mark.phase.clone(), step: false });
    }
    all
}

/// The largest blocks at the peak.
fn largest(process: &Process) -> Vec<Table> {
    let Some(peak) = process.peak.as_ref().filter(|peak| !peak.blocks.is_empty()) else {
        return Vec::new();
    };
    let row = |block: &Block| {
        let category = block.category.replace('_', " ");
        vec![
            block.bytes.into(),
            category.into(),
            block.name.clone().into(),
            block.line.clone().into(),
        ]
    };
    vec![Table {
        name: "The largest blocks at the peak".to_owned(),
        columns: vec![
            ("bytes", Kind::Bytes),
            ("category", Kind::Text),
            ("name", Kind::Text),
            ("made at", Kind::Text),
        ],
        rows: peak.blocks.iter().map(row).collect(),
    }]
}
