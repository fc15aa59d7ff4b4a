//! Memory over a job's first iterations, stacked by what it holds.

use std::io;

use plotters::element::{PathElement, Rectangle, Text};
use plotters::prelude::*;

use super::curve::{
    self, Area, COLOURS, COLUMNS, Drawn, FAINT, INK, LEFT, Scale, TOP, cut, font, size,
};
use crate::units::Bytes;

/// What stands after one event, by category.
pub type Sample = Vec<u64>;

/// A place on the horizontal axis with a name.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Events before it.
    pub event: u64,
    /// Written beside it.
    pub name: String,
}

/// Events, in units of which their axis counts.
const COUNTS: [(&str, u64); 2] = [("thousands", 1_000), ("", 1)];
/// Categories that share the colours' end.
const GREYS: [RGBColor; 2] = [RGBColor(150, 150, 150), RGBColor(200, 200, 200)];

fn colour(category: usize) -> RGBColor {
    let all = COLOURS.iter().chain(&GREYS);
    all.cycle().nth(category).copied().unwrap_or(INK)
}

/// A colour on white paper, at two thirds of its strength.
fn tint(RGBColor(r, g, b): RGBColor) -> RGBColor {
    let mix = |c: u8| u8::try_from((u32::from(c) * 2 + 255) / 3).unwrap_or(u8::MAX);
    RGBColor(mix(r), mix(g), mix(b))
}

/// Draws the samples, one for each event, below a title, as an SVG document: bytes of category 0 at
/// the bottom, the others above it in order. Marks are vertical lines.
///
/// # Errors
/// When the drawing library fails, which drawing into memory gives no reason for.
pub fn svg(title: &str, names: &[&str], samples: &[Sample], marks: &[Mark]) -> io::Result<String> {
    curve::document(|root| draw(root, title, names, samples, marks))
}

fn draw(root: &Area<'_>, title: &str, names: &[&str], samples: &[Sample], marks: &[Mark]) -> Drawn {
    let end = (samples.len() as u64).max(1);
    let total = |sample: &Sample| sample.iter().sum::<u64>();
    let highest = samples.iter().map(total).max().unwrap_or(0).max(1);
    let top = highest.saturating_add(highest / 16);
    let (events, memory) = (Scale::of(end, &COUNTS, 8), Scale::of(highest, &curve::SIZES, 6));
    let across = match events.unit {
        "" => "allocator request".to_owned(),
        unit => format!("allocator request ({unit})"),
    };
    let up = curve::device_memory(&memory);
    let mut chart = curve::frame(root, TOP, &across, &up, (&events, end), (&memory, top))?;
    let kept = thin(samples);
    let used: Vec<usize> =
        (0..names.len()).filter(|&c| samples.iter().any(|s| s.get(c) > Some(&0))).collect();
    // From the top: each area covers what lies below it.
    for (place, &category) in used.iter().enumerate().rev() {
        let below = &used[..=place];
        let heights = kept.iter().map(|&at| {
            let sum: u64 = below.iter().filter_map(|&c| samples[at].get(c)).sum();
            (events.units(at as u64), memory.units(sum))
        });
        let mut corners: Vec<(f64, f64)> = Vec::with_capacity(2 * kept.len());
        for (x, y) in heights {
            if let Some(&(_, before)) = corners.last() {
                corners.push((x, before));
            }
            corners.push((x, y));
        }
        chart.draw_series(AreaSeries::new(corners, 0.0, tint(colour(category)).filled()))?;
    }
    for mark in marks.iter().filter(|m| m.event < end) {
        let x = events.units(mark.event);
        let line = PathElement::new(vec![(x, 0.0), (x, memory.units(top))], FAINT.stroke_width(1));
        chart.draw_series([line])?;
        let (x, y) = chart.backend_coord(&(x, memory.units(top)));
        root.draw(&Text::new(cut(&mark.name, 12), (x + 3, y + 2), font(11, &FAINT)))?;
    }
    legend(root, title, names, &used, samples)
}

/// The title, and each category behind a swatch with the most that it ever holds.
fn legend(
    root: &Area<'_>,
    title: &str,
    names: &[&str],
    used: &[usize],
    samples: &[Sample],
) -> Drawn {
    let left = LEFT as i32;
    root.draw(&Text::new(cut(title, 90), (left, 10), font(17, &INK)))?;
    let mut x = left;
    for &category in used {
        let most = samples.iter().filter_map(|s| s.get(category)).max().copied().unwrap_or(0);
        let text = format!("{} {}", names[category], size(Bytes(most)));
        let swatch = tint(colour(category)).filled();
        root.draw(&Rectangle::new([(x, 44), (x + 10, 54)], swatch))?;
        // About as wide as sans-serif letters of this size are.
        let width = text.chars().count() as i32 * 6;
        root.draw(&Text::new(text, (x + 14, 43), font(11, &INK)))?;
        x += 14 + width + 10;
    }
    Ok(())
}

/// The samples that a pixel column can show: its first, its highest and its last.
fn thin(samples: &[Sample]) -> Vec<usize> {
    let many = samples.len() as u64;
    let mut kept = Vec::new();
    for column in 0..COLUMNS.min(many) {
        let from = (column * many / COLUMNS.min(many)) as usize;
        let to = ((column + 1) * many / COLUMNS.min(many)) as usize;
        let highest = (from..to).max_by_key(|&i| (samples[i].iter().sum::<u64>(), usize::MAX - i));
        let mut column: Vec<usize> = [from, to - 1].into_iter().chain(highest).collect();
        column.sort_unstable();
        column.dedup();
        kept.append(&mut column);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_its_categories_marks_and_peaks() {
        let samples: Vec<Sample> =
            (0..5000u64).map(|i| vec![8 << 20, (i % 100) << 20, 0]).collect();
        let marks = [Mark { event: 100, name: "step 1".into() }];
        let names = ["parameters", "activations", "never"];
        let picture = svg("a job", &names, &samples, &marks).expect("it is drawn");
        for part in ["parameters 8.00 MiB", "activations 99.00 MiB", "step 1", "device memory"] {
            assert!(picture.contains(part), "{part}");
        }
        assert!(!picture.contains("never"));
        assert_eq!(picture, svg("a job", &names, &samples, &marks).expect("it is drawn"));
        assert!(svg("", &[], &[], &[]).expect("it is drawn").contains("</svg>"));
    }

    #[test]
    fn thinning_keeps_the_highest_sample() {
        let mut samples: Vec<Sample> = vec![vec![1]; 100_000];
        samples[54_321] = vec![9];
        let kept = thin(&samples);
        assert!(kept.contains(&54_321) && kept.contains(&0) && kept.contains(&99_999));
        assert!(kept.is_sorted());
    }
}
