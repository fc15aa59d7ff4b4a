//! A curve over any number of events, in bounded memory.

use std::path::Path;

use neap::report::curve::{Across, Curve, Line, svg_across};
use neap::sim::allocator::Stats;
use neap::sim::allocator::replay::Report;
use neap::units::{Bytes, Nanos};

use super::Target;
use crate::output;

/// A curve that is thinned while it grows. It has a bounded number of ranges of events, each with
/// its first, highest, lowest and last values of allocated and reserved bytes.
pub struct Points {
    pub wanted: bool,
    stride: u64,
    all: Vec<[Stretch; 2]>,
    end: u64,
}

#[derive(Clone, Copy)]
struct Stretch {
    first: u64,
    highest: u64,
    lowest: u64,
    last: u64,
}

impl Stretch {
    fn join(&mut self, later: Self) {
        self.highest = self.highest.max(later.highest);
        self.lowest = self.lowest.min(later.lowest);
        self.last = later.last;
    }
}

impl Points {
    const MOST: usize = 1 << 13;

    pub const fn new(wanted: bool) -> Self {
        Self { wanted, stride: 1, all: Vec::new(), end: 0 }
    }

    pub fn add(&mut self, index: u64, now: &Stats) {
        if !self.wanted {
            return;
        }
        let new = [now.allocated.0, now.reserved.0].map(|v| Stretch {
            first: v,
            highest: v,
            lowest: v,
            last: v,
        });
        match self.all.get_mut((index / self.stride) as usize) {
            Some(stretch) => stretch.iter_mut().zip(new).for_each(|(s, n)| s.join(n)),
            None => self.all.push(new),
        }
        if self.all.len() == Self::MOST {
            self.stride *= 2;
            let pairs = self.all.chunks_exact(2).map(|pair| {
                let mut joined = pair[0];
                joined.iter_mut().zip(pair[1]).for_each(|(s, n)| s.join(n));
                joined
            });
            self.all = pairs.collect();
        }
        self.end = index;
    }

    fn curve(&self, which: usize) -> Vec<(Nanos, Bytes)> {
        let at = |index: usize, part: u64, value: u64| {
            (
                Nanos((index as u64 * self.stride + part * self.stride / 4).min(self.end)),
                Bytes(value),
            )
        };
        let four = |(i, s): (usize, &[Stretch; 2])| {
            let Stretch { first, highest, lowest, last } = s[which];
            [at(i, 0, first), at(i, 1, highest), at(i, 2, lowest), at(i, 3, last)]
        };
        self.all.iter().enumerate().flat_map(four).collect()
    }

    pub fn draw(
        &self,
        path: &Path,
        events: &Path,
        report: &Report,
        target: Option<&Target>,
    ) -> anyhow::Result<()> {
        let (allocated, reserved) = (self.curve(0), self.curve(1));
        let curves = [
            Curve { name: "reserved", points: &reserved },
            Curve { name: "allocated", points: &allocated },
        ];
        // A line for a device far above the curve would flatten the curve.
        let near = target.filter(|t| t.capacity.0 / 2 <= report.at_peak.reserved.0);
        let lines: Vec<_> =
            near.map(|t| Line { name: &t.name, value: t.capacity }).into_iter().collect();
        let title =
            events.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let drawing = svg_across(Across::Events, &title, &curves, &lines)?;
        output::write(path, &drawing)
    }
}
