//! Memory over time as SVG: filled step curves, with lines for budget and floor.
//!
//! The viewer's sans-serif font draws the text. The same input gives the same bytes. Of hundreds of
//! thousands of points only those that a pixel column can show are kept: its first, lowest, highest
//! and last value.

use std::fmt::Write as _;
use std::io;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::plain;
use crate::units::{Bytes, Nanos};

/// A value over time.
#[derive(Clone, Copy, Debug)]
pub struct Curve<'a> {
    /// Its name in the legend.
    pub name: &'a str,
    /// The value from each instant on, in order of time. The last point is where the curve ends.
    pub points: &'a [(Nanos, Bytes)],
}

/// A horizontal line, such as a budget.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// Its name, written at its right end.
    pub name: &'a str,
    /// The level.
    pub value: Bytes,
}

pub(super) const SIZE: (u32, u32) = (960, 480);
/// Pixels around the plot: for title and legend, for the names of lines, and for the axes.
pub(super) const TOP: u32 = 72;
const RIGHT: u32 = 118;
pub(super) const LEFT: u32 = 76;
const BOTTOM: u32 = 52;
/// The part of it that the axes and their titles take.
const AXIS_LEFT: u32 = 58;
const AXIS_BOTTOM: u32 = 42;
/// Number of pixel columns. Each keeps at most four points of a curve.
pub(super) const COLUMNS: u64 = (SIZE.0 - LEFT - RIGHT) as u64;

/// Okabe and Ito's colours, which the colour-blind can tell apart; vermilion and blue first.
pub(super) const COLOURS: [RGBColor; 6] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];
pub(super) const INK: RGBColor = RGBColor(38, 38, 38);
pub(super) const FAINT: RGBColor = RGBColor(110, 110, 110);
pub(super) const GRID: RGBColor = RGBColor(228, 228, 228);

/// The unit of the horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Across {
    /// Time.
    Time,
    /// Events of a sequence: an instant of n ns is event number n.
    Events,
    /// Sizes of what a script works on: n ns is the size n.
    Sizes,
}

/// Draws curves and lines over time below a title, as an SVG document.
///
/// # Errors
/// When the drawing library fails. It gives no reason when it draws into memory.
pub fn svg(title: &str, curves: &[Curve<'_>], lines: &[Line<'_>]) -> io::Result<String> {
    svg_across(Across::Time, title, curves, lines)
}

/// As [`svg`], over time or events.
///
/// # Errors
/// As [`svg`].
pub fn svg_across(
    across: Across,
    title: &str,
    curves: &[Curve<'_>],
    lines: &[Line<'_>],
) -> io::Result<String> {
    document(|root| draw(root, across, title, curves, lines))
}

/// Runs `draw` on a white area and returns the SVG document.
pub(super) fn document(draw: impl FnOnce(&Area<'_>) -> Drawn) -> io::Result<String> {
    let mut out = String::new();
    {
        let root = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        let drawn = root.fill(&WHITE).and_then(|()| draw(&root)).and_then(|()| root.present());
        drawn.map_err(|e| io::Error::other(e.to_string()))?;
    }
    Ok(out)
}

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

fn draw(
    root: &Area<'_>,
    across: Across,
    title: &str,
    curves: &[Curve<'_>],
    lines: &[Line<'_>],
) -> Drawn {
    let end =
        curves.iter().filter_map(|c| c.points.last()).map(|p| p.0.0).max().unwrap_or(0).max(1);
    let values =
        curves.iter().flat_map(|c| c.points).map(|p| p.1).chain(lines.iter().map(|l| l.value));
    let highest = values.max().unwrap_or(Bytes::ZERO).0.max(1);
    let (units, what): (&[_], _) = match across {
        Across::Time => (&TIMES, "time"),
        Across::Events => (&COUNTS, "event"),
        Across::Sizes => (&COUNTS, "size"),
    };
    let (time, memory) = (Scale::new(end, units, 8), Scale::new(highest, &SIZES, 6));
    // Some room above the highest value.
    let top = highest.saturating_add(highest / 16);

    let across =
        if time.unit.is_empty() { what.to_owned() } else { format!("{what} ({})", time.unit) };
    let mut chart =
        frame(root, TOP, &across, &device_memory(&memory), (&time, end), (&memory, top))?;

    let drawn: Vec<Vec<_>> = curves
        .iter()
        .map(|curve| {
            steps(&thin(curve.points, end))
                .into_iter()
                .map(|(t, v)| (time.units(t.0), memory.units(v.0)))
                .collect()
        })
        .collect();
    // All areas are drawn before any outline, so that no area covers an outline.
    for (corners, colour) in drawn.iter().zip(COLOURS.iter().cycle()) {
        chart.draw_series(AreaSeries::new(corners.iter().copied(), 0.0, colour.mix(0.14)))?;
    }
    for (corners, colour) in drawn.into_iter().zip(COLOURS.iter().cycle()) {
        chart.draw_series(LineSeries::new(corners, colour.stroke_width(2)))?;
    }

    levels(root, &mut chart, lines, &memory, time.units(end))?;
    legend(root, title, curves)
}

/// The title of an axis of bytes.
pub(super) fn device_memory(scale: &Scale) -> String {
    format!("device memory ({})", scale.unit)
}

pub(super) type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis<'b>, Axis<'b>>>;

/// Draws axes and grid, `above` pixels below the top. `across` and `up` are the titles of the axes;
/// each axis has a scale and a highest value.
pub(super) fn frame<'a, 'b>(
    root: &Area<'a>,
    above: u32,
    across: &str,
    up: &str,
    (horizontal, end): (&'b Scale, u64),
    (vertical, top): (&'b Scale, u64),
) -> Result<Chart<'a, 'b>, DrawingAreaErrorKind<io::Error>> {
    let mut chart = ChartBuilder::on(root)
        .margin_top(above)
        .margin_right(RIGHT)
        .margin_left(LEFT - AXIS_LEFT)
        .margin_bottom(BOTTOM - AXIS_BOTTOM)
        .set_label_area_size(LabelAreaPosition::Left, AXIS_LEFT)
        .set_label_area_size(LabelAreaPosition::Bottom, AXIS_BOTTOM)
        .build_cartesian_2d(
            Axis { scale: horizontal, highest: end },
            Axis { scale: vertical, highest: top },
        )?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(FAINT)
        .x_labels(16)
        .y_labels(16)
        .label_style(font(12, &FAINT))
        .axis_desc_style(font(12, &INK))
        .x_desc(across)
        .y_desc(up)
        .draw()?;
    Ok(chart)
}

/// Draws each line across, up to `end`, and writes its name.
pub(super) fn levels(
    root: &Area<'_>,
    chart: &mut Chart<'_, '_>,
    lines: &[Line<'_>],
    memory: &Scale,
    end: f64,
) -> Drawn {
    let mut labels = Vec::new();
    for line in lines {
        let y = memory.units(line.value.0);
        let across = [(0.0, y), (end, y)];
        chart.draw_series(DashedLineSeries::new(across, 6, 4, INK.stroke_width(1)))?;
        labels.push((chart.backend_coord(&across[1]), line));
    }
    names(root, labels)
}

/// Writes each line's name and value at its right end, moved down where it would cover the one
/// above.
fn names(root: &Area<'_>, mut labels: Vec<((i32, i32), &Line<'_>)>) -> Drawn {
    const HEIGHT: i32 = 30;
    labels.sort_by_key(|((_, y), _)| *y);
    let bottom = (SIZE.1 - BOTTOM) as i32;
    let mut free = i32::MIN;
    let count = labels.len() as i32;
    for (index, ((x, y), line)) in labels.into_iter().enumerate() {
        // The names must not go below the plot, so room is kept for those that follow.
        let y = (y - HEIGHT / 2).min(bottom - HEIGHT * (count - index as i32)).max(free);
        free = y + HEIGHT;
        let at = |dy| (x + 8, y + dy);
        root.draw(&Text::new(cut(line.name, 18), at(2), font(12, &INK)))?;
        root.draw(&Text::new(size(line.value), at(16), font(12, &FAINT)))?;
    }
    Ok(())
}

/// Writes the title, and below it each curve's name and peak behind a swatch of its colour.
fn legend(root: &Area<'_>, title: &str, curves: &[Curve<'_>]) -> Drawn {
    let left = LEFT as i32;
    root.draw(&Text::new(cut(title, 90), (left, 14), font(17, &INK)))?;
    let mut x = left;
    for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let peak = curve.points.iter().map(|p| p.1).max().unwrap_or(Bytes::ZERO);
        let text = format!("{}, peak {}", cut(curve.name, 40), size(peak));
        root.draw(&Rectangle::new([(x, 44), (x + 14, 54)], colour.mix(0.25).filled()))?;
        root.draw(&Rectangle::new([(x, 44), (x + 14, 54)], colour.stroke_width(2)))?;
        // The approximate width of sans-serif letters of this size.
        let width = text.chars().count() as i32 * 13 / 2;
        root.draw(&Text::new(text, (x + 21, 43), font(12, &INK)))?;
        x += 21 + width + 26;
    }
    Ok(())
}

/// A size with two decimals, rounded down, in the unit of an axis that ends there.
pub(super) fn size(value: Bytes) -> String {
    let scale = Scale::new(value.0, &SIZES, 8);
    let (whole, rest) = (value.0 / scale.one, value.0 % scale.one);
    let hundredths = u128::from(rest) * 100 / u128::from(scale.one);
    if scale.one == 1 {
        format!("{whole} {}", scale.unit)
    } else {
        format!("{whole}.{hundredths:02} {}", scale.unit)
    }
}

/// A sans-serif font of `pixels`: the SVG writer divides sizes by 1.24.
pub(super) fn font(pixels: u32, colour: &RGBColor) -> TextStyle<'static> {
    ("sans-serif", f64::from(pixels) * 1.24)
        .into_font()
        .color(colour)
        .pos(Pos::new(HPos::Left, VPos::Top))
}

/// Cuts a text to one line of at most `longest` characters.
pub(super) fn cut(text: &str, longest: usize) -> String {
    let text = plain(text);
    if text.chars().count() <= longest {
        return text.into_owned();
    }
    text.chars().take(longest - 1).chain(['…']).collect()
}

/// Keeps of each pixel column its first, lowest, highest and last value.
fn thin(points: &[(Nanos, Bytes)], end: u64) -> Vec<(Nanos, Bytes)> {
    let column = |t: Nanos| u128::from(t.0) * u128::from(COLUMNS) / u128::from(end);
    let mut kept = Vec::new();
    for run in points.chunk_by(|a, b| column(a.0) == column(b.0)) {
        let by = |index: &usize| run[*index].1;
        let indices = 0..run.len();
        let mut keep = vec![0, run.len() - 1];
        keep.extend(indices.clone().min_by_key(by));
        keep.extend(indices.max_by_key(by));
        keep.sort_unstable();
        keep.dedup();
        kept.extend(keep.into_iter().map(|index| run[index]));
    }
    kept
}

/// The corners of a step curve.
pub(super) fn steps(points: &[(Nanos, Bytes)]) -> Vec<(Nanos, Bytes)> {
    let mut corners: Vec<(Nanos, Bytes)> = Vec::with_capacity(points.len() * 2);
    for &(t, v) in points {
        if let Some(&(_, before)) = corners.last()
            && before != v
        {
            corners.push((t, before));
        }
        corners.push((t, v));
    }
    corners
}

pub(super) const TIMES: [(&str, u64); 4] =
    [("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000), ("ns", 1)];
pub(super) const COUNTS: [(&str, u64); 3] =
    [("millions", 1_000_000), ("thousands", 1_000), ("", 1)];
pub(super) const SIZES: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1)];

/// The unit of an axis and its ticks, which are 1, 2 or 5 times a power of ten apart.
pub(super) struct Scale {
    pub unit: &'static str,
    one: u64,
    /// Distance between ticks: `step` · 10^-`decimals` units.
    step: u64,
    decimals: u32,
}

impl Scale {
    /// A scale for values up to `highest`: the largest unit of which that is at least two, and at
    /// most `most` ticks above zero.
    pub fn new(highest: u64, units: &[(&'static str, u64)], most: u128) -> Self {
        let fits = units.iter().find(|(_, one)| highest / 2 >= *one).or(units.last());
        let (unit, one) = fits.copied().unwrap_or(("", 1));
        // Ticks are at least a hundredth of a unit apart, or a whole unit if the unit is
        // indivisible.
        let finest: u32 = if one == 1 { 0 } else { 2 };
        let mut steps = (0..18).flat_map(|power| [1, 2, 5].map(|m| m * 10u64.pow(power)));
        let few = |step: &u64| {
            u128::from(highest) * 10u128.pow(finest) / (u128::from(*step) * u128::from(one)) <= most
        };
        let step = steps.find(few).unwrap_or(5 * 10u64.pow(17));
        let mut scale = Self { unit, one, step, decimals: finest };
        while scale.decimals > 0 && scale.step.is_multiple_of(10) {
            scale.step /= 10;
            scale.decimals -= 1;
        }
        scale
    }

    pub fn units(&self, value: u64) -> f64 {
        value as f64 / self.one as f64
    }

    fn ticks(&self, highest: u64) -> Vec<f64> {
        let divisor = 10u64.pow(self.decimals) as f64;
        (0u64..)
            .map(|n| (n * self.step) as f64 / divisor)
            .take_while(|tick| *tick <= self.units(highest))
            .collect()
    }

    fn label(&self, tick: f64) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = write!(text, "{tick:.*}", self.decimals as usize);
        text
    }
}

/// A scale from zero to `highest`, in the drawing library's form.
pub(super) struct Axis<'a> {
    pub(super) scale: &'a Scale,
    pub(super) highest: u64,
}

impl Ranged for Axis<'_> {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = value / self.scale.units(self.highest);
        limit.0 + (f64::from(limit.1 - limit.0) * share).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.scale.ticks(self.highest)
    }

    fn range(&self) -> Range<f64> {
        0.0..self.scale.units(self.highest)
    }
}

impl ValueFormatter<f64> for Axis<'_> {
    fn format_ext(&self, value: &f64) -> String {
        self.scale.label(*value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(all: &[(u64, u64)]) -> Vec<(Nanos, Bytes)> {
        all.iter().map(|&(t, v)| (Nanos(t), Bytes(v))).collect()
    }

    #[test]
    fn steps_turn_corners() {
        assert_eq!(
            steps(&points(&[(0, 5), (3, 7), (4, 7), (9, 0)])),
            points(&[(0, 5), (3, 5), (3, 7), (4, 7), (9, 7), (9, 0)])
        );
        assert_eq!(steps(&[]), []);
    }

    #[test]
    fn thinning_keeps_every_peak_and_both_ends() {
        let end = 1_000_000;
        let all: Vec<_> = (0..=end)
            .step_by(5)
            .map(|t| (Nanos(t), Bytes(t * 7_919 % 1_009 + if t == 123_455 { 5_000 } else { 0 })))
            .collect();
        let thinned = thin(&all, end);
        assert!(thinned.len() <= 4 * (COLUMNS as usize + 1), "{}", thinned.len());
        assert!(thinned.contains(&(Nanos(123_455), Bytes(123_455 * 7_919 % 1_009 + 5_000))));
        assert_eq!((thinned.first(), thinned.last()), (all.first(), all.last()));
        assert!(thinned.is_sorted_by_key(|p| p.0));
    }

    #[test]
    fn ticks_are_round_in_the_fitting_unit() {
        let labels = |highest, units: &[_], most| {
            let scale = Scale::new(highest, units, most);
            (
                scale.unit,
                scale
                    .ticks(highest)
                    .into_iter()
                    .map(|t| scale.label(t))
                    .collect::<Vec<_>>()
                    .join(" "),
            )
        };
        assert_eq!(labels(15_600_000_000, &TIMES, 8), ("s", "0 2 4 6 8 10 12 14".to_owned()));
        assert_eq!(labels(2_000_000, &TIMES, 8), ("ms", "0.0 0.5 1.0 1.5 2.0".to_owned()));
        assert_eq!(labels(1_999_999, &TIMES, 8), ("µs", "0 500 1000 1500".to_owned()));
        assert_eq!(labels(3 << 30, &SIZES, 6), ("GiB", "0.0 0.5 1.0 1.5 2.0 2.5 3.0".to_owned()));
        assert_eq!(labels(1, &SIZES, 6), ("bytes", "0 1".to_owned()));
        assert_eq!(labels(u64::MAX, &SIZES, 6).0, "TiB");
    }

    #[test]
    fn the_same_input_gives_the_same_bytes_and_odd_input_no_panic() {
        let one = points(&[(0, 10 << 20), (5_000, 30 << 20), (9_000, 0)]);
        let curves =
            [Curve { name: "before <&>", points: &one }, Curve { name: "nothing", points: &[] }];
        let lines = [
            Line { name: "budget", value: Bytes(20 << 20) },
            Line { name: "floor", value: Bytes(20 << 20) },
        ];
        let first = svg("a \u{0} title", &curves, &lines).unwrap();
        assert_eq!(first, svg("a \u{0} title", &curves, &lines).unwrap());
        for part in [
            "<svg ",
            "before &lt;&amp;&gt;, peak 30.00 MiB",
            "budget",
            "floor",
            "device memory (MiB)",
            "time (µs)",
            "</svg>",
        ] {
            assert!(first.contains(part), "{part}: {first}");
        }
        assert!(!first.contains('\0'));
        assert!(svg("", &[], &[]).unwrap().contains("</svg>"));
        let extreme = points(&[(u64::MAX, u64::MAX)]);
        assert!(svg("", &[Curve { name: "", points: &extreme }], &[]).is_ok());
    }
}
