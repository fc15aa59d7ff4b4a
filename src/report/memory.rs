//! The use of memory over time, as SVG: layers on top of each other, and above them the reserved
//! bytes.
//!
//! Points are thinned as they arrive, so that millions of them take no more memory than the
//! picture.

use std::io;

use plotters::prelude::*;

use super::curve::{
    Across, Area, COLUMNS, COUNTS, Drawn, FAINT, INK, LEFT, Line, SIZE, SIZES, Scale, TIMES, TOP,
    cut, device_memory, document, font, frame, levels, size, steps,
};
use crate::units::{Bytes, Nanos};

/// The most layers: one for each colour.
pub const LAYERS: usize = 8;

/// Okabe and Ito's colours, which the colour-blind can tell apart, and grey.
const COLOURS: [RGBColor; LAYERS] = [
    RGBColor(0, 114, 178),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(213, 94, 0),
    RGBColor(240, 228, 66),
    RGBColor(204, 121, 167),
    RGBColor(150, 150, 150),
];

/// The time steps that the drawing separates: two pixels each.
const STEPS: u64 = COLUMNS / 2;

/// Bytes at an instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instant {
    /// The time.
    pub time: Nanos,
    /// Bytes of each layer.
    pub layers: [u64; LAYERS],
    /// Reserved bytes.
    pub reserved: u64,
}

impl Instant {
    fn sum(&self) -> u64 {
        self.layers.iter().fold(0, |a, &b| a.saturating_add(b))
    }
}

/// Layers over time, thinned: of each step of two pixels the first, highest, lowest and last
/// instants are kept.
#[derive(Clone, Debug)]
pub struct Stack {
    across: Across,
    end: u64,
    column: Option<(u64, [Instant; 4])>,
    kept: Vec<Instant>,
    /// Each layer's highest value.
    peaks: [u64; LAYERS],
    reserved: u64,
}

impl Stack {
    /// A stack for instants from 0 to `end`.
    #[must_use]
    pub fn new(end: Nanos) -> Self {
        Self::over(Across::Time, end)
    }

    /// As [`new`](Self::new), over time or events.
    #[must_use]
    pub fn over(across: Across, end: Nanos) -> Self {
        Self {
            across,
            end: end.0.max(1),
            column: None,
            kept: Vec::new(),
            peaks: [0; LAYERS],
            reserved: 0,
        }
    }

    /// Adds the bytes from an instant on; instants come in order of time.
    pub fn add(&mut self, now: Instant) {
        let column = (u128::from(now.time.0) * u128::from(STEPS) / u128::from(self.end)) as u64;
        for (peak, layer) in self.peaks.iter_mut().zip(now.layers) {
            *peak = (*peak).max(layer);
        }
        self.reserved = self.reserved.max(now.reserved);
        match &mut self.column {
            Some((at, [_, highest, lowest, last])) if *at == column => {
                if now.sum() > highest.sum() {
                    *highest = now;
                }
                if now.sum() < lowest.sum() {
                    *lowest = now;
                }
                *last = now;
            }
            _ => {
                self.keep();
                self.column = Some((column, [now; 4]));
            }
        }
    }

    fn keep(&mut self) {
        let Some((_, mut four)) = self.column.take() else { return };
        four.sort_by_key(|i| i.time);
        for instant in four {
            if self.kept.last() != Some(&instant) {
                self.kept.push(instant);
            }
        }
    }

    /// Draws the stack below a title, with a line for each of `lines` and a mark at the beginning
    /// of each iteration of `starts`.
    ///
    /// # Errors
    /// When the drawing library fails. It gives no reason when it draws into memory.
    pub fn svg(
        mut self,
        title: &str,
        layers: &[&str],
        lines: &[Line<'_>],
        starts: &[Nanos],
    ) -> io::Result<String> {
        self.keep();
        document(|root| self.draw(root, title, layers, lines, starts))
    }

    fn draw(
        &self,
        root: &Area<'_>,
        title: &str,
        layers: &[&str],
        lines: &[Line<'_>],
        starts: &[Nanos],
    ) -> Drawn {
        let sums = self.kept.iter().map(Instant::sum);
        let highest = sums
            .chain([self.reserved])
            .chain(lines.iter().map(|l| l.value.0))
            .max()
            .unwrap_or(0)
            .max(1);
        let (units, what): (&[_], _) = match self.across {
            Across::Time => (&TIMES, "time of the trace"),
            Across::Events => (&COUNTS, "allocator request"),
            Across::Sizes => (&COUNTS, "size"),
        };
        let (time, memory) = (Scale::new(self.end, units, 8), Scale::new(highest, &SIZES, 6));
        let top = highest.saturating_add(highest / 12);
        let across = match time.unit {
            "" => what.to_owned(),
            unit => format!("{what} ({unit})"),
        };
        let mut chart = frame(
            root,
            TOP + 16,
            &across,
            &device_memory(&memory),
            (&time, self.end),
            (&memory, top),
        )?;
        let corners = |value: &dyn Fn(&Instant) -> u64| -> Vec<(f64, f64)> {
            let points: Vec<_> = self.kept.iter().map(|i| (i.time, Bytes(value(i)))).collect();
            steps(&points).into_iter().map(|(t, v)| (time.units(t.0), memory.units(v.0))).collect()
        };
        // The highest sum is drawn first. Each smaller one covers it from below, so that the
        // visible part is the layer.
        for layer in (0..LAYERS).rev().filter(|&l| self.peaks[l] > 0) {
            let sum = corners(&|i| i.layers[..=layer].iter().fold(0, |a, &b| a.saturating_add(b)));
            chart.draw_series(AreaSeries::new(
                sum.iter().copied(),
                0.0,
                COLOURS[layer].filled(),
            ))?;
        }
        chart.draw_series(LineSeries::new(corners(&|i| i.reserved), INK.stroke_width(2)))?;
        for (index, start) in starts.iter().enumerate() {
            let x = time.units(start.0);
            let line = [(x, 0.0), (x, memory.units(top))];
            chart.draw_series(DashedLineSeries::new(line, 2, 4, FAINT.stroke_width(1)))?;
            let (x, y) = chart.backend_coord(&line[1]);
            root.draw(&Text::new(
                format!("iteration {}", index + 1),
                (x + 3, y + 2),
                font(11, &FAINT),
            ))?;
        }
        levels(root, &mut chart, lines, &memory, time.units(self.end))?;
        self.legend(root, title, layers)
    }

    /// Draws the title, and below it each layer's name and peak in at most two rows.
    fn legend(&self, root: &Area<'_>, title: &str, layers: &[&str]) -> Drawn {
        let left = LEFT as i32;
        root.draw(&Text::new(cut(title, 90), (left, 14), font(17, &INK)))?;
        let (mut x, mut y) = (left, 42);
        let named = layers.iter().zip(self.peaks).zip(COLOURS).filter(|((_, peak), _)| *peak > 0);
        let entries = named.map(|((name, peak), colour)| (*name, peak, colour, true)).chain([(
            "reserved",
            self.reserved,
            INK,
            false,
        )]);
        for (name, peak, colour, filled) in entries {
            let text = format!("{} {}", cut(name, 24), size(Bytes(peak)));
            // The approximate width of sans-serif letters of this size.
            let width = text.chars().count() as i32 * 13 / 2;
            if x > left && x + 21 + width > SIZE.0 as i32 - 16 {
                (x, y) = (left, y + 18);
            }
            let (from, to) =
                if filled { ((x, y + 2), (x + 14, y + 12)) } else { ((x, y + 6), (x + 14, y + 8)) };
            root.draw(&Rectangle::new([from, to], colour.filled()))?;
            root.draw(&Text::new(text, (x + 21, y + 1), font(12, &INK)))?;
            x += 21 + width + 22;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instant(time: u64, first: u64, last: u64, reserved: u64) -> Instant {
        let mut layers = [0; LAYERS];
        (layers[0], layers[LAYERS - 1]) = (first, last);
        Instant { time: Nanos(time), layers, reserved }
    }

    #[test]
    fn thinning_keeps_the_highest_and_the_ends() {
        let mut stack = Stack::new(Nanos(1_000_000));
        for t in 0..=1_000_000 {
            stack.add(instant(t, t % 97, if t == 345_678 { 5_000 } else { 1 }, 9_000));
        }
        stack.keep();
        assert!(stack.kept.len() <= 4 * (STEPS as usize + 1), "{}", stack.kept.len());
        assert!(stack.kept.contains(&instant(345_678, 345_678 % 97, 5_000, 9_000)));
        assert_eq!(
            (stack.kept.first().unwrap().time, stack.kept.last().unwrap().time),
            (Nanos(0), Nanos(1_000_000))
        );
        assert!(stack.kept.is_sorted_by_key(|i| i.time));
    }

    #[test]
    fn it_names_what_there_is_and_survives_what_is_odd() {
        let mut stack = Stack::new(Nanos(10_000));
        for i in [
            instant(0, 10 << 20, 0, 20 << 20),
            instant(5_000, 30 << 20, 8 << 20, 40 << 20),
            instant(10_000, 0, 8 << 20, 40 << 20),
        ] {
            stack.add(i);
        }
        let names = ["weights <&>", "b", "c", "d", "e", "f", "g", "workspaces"];
        let lines = [Line { name: "small gpu", value: Bytes(50 << 20) }];
        let draw = |s: &Stack| {
            s.clone().svg("a title", &names, &lines, &[Nanos(0), Nanos(5_000)]).unwrap()
        };
        let first = draw(&stack);
        assert_eq!(first, draw(&stack));
        for part in [
            "weights &lt;&amp;&gt; 30.00 MiB",
            "workspaces 8.00 MiB",
            "reserved 40.00 MiB",
            "small gpu",
            "iteration 2",
            "</svg>",
        ] {
            assert!(first.contains(part), "{part}: {first}");
        }
        assert!(Stack::new(Nanos(0)).svg("", &[], &[], &[]).unwrap().contains("</svg>"));
        let mut extreme = Stack::new(Nanos(u64::MAX));
        extreme.add(instant(u64::MAX, u64::MAX, u64::MAX, u64::MAX));
        assert!(extreme.svg("", &names, &[], &[]).is_ok());
    }
}
