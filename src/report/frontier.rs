//! Time against memory as SVG: a curve for each planner, and the lower bound.
//!
//! Each device has a panel, one below the other, with the same colours. Time is the ratio to the
//! unplanned iteration. A point above [`HIGHEST`] is a triangle at the upper edge, with its value.
//! The line to it ends at the edge. The same input gives the same bytes.

use std::io;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::curve::{Axis, COLOURS, FAINT, GRID, INK, SIZES, Scale, cut, font};
use crate::units::{Bytes, Nanos};

/// A planner: its name, and the memory and time of each of its plans, by memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Peak and iteration time of each plan.
    pub points: Vec<(Bytes, Nanos)>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panel {
    /// Its title.
    pub title: String,
    /// Peak and iteration time without a plan.
    pub unplanned: (Bytes, Nanos),
    /// The curves, in the order of their colours.
    pub curves: Vec<Curve>,
    /// The bound by memory. No plan is below it.
    pub bound: Vec<(Bytes, Nanos)>,
}

/// Ratios above this are not drawn to scale.
pub const HIGHEST: f64 = 2.5;
const WIDTH: u32 = 960;
const HEIGHT: u32 = 420;

type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Draws the panels as one SVG document.
///
/// # Errors
/// When the drawing library fails. It gives no reason when it draws into memory.
pub fn svg(panels: &[Panel]) -> io::Result<String> {
    let mut out = String::new();
    {
        let rows = panels.len().max(1);
        let height = HEIGHT.saturating_mul(u32::try_from(rows).unwrap_or(1));
        let root = SVGBackend::with_string(&mut out, (WIDTH, height)).into_drawing_area();
        let draw_all = || -> Drawn {
            root.fill(&WHITE)?;
            for (area, panel) in root.split_evenly((rows, 1)).iter().zip(panels) {
                draw(area, panel)?;
            }
            root.present()
        };
        draw_all().map_err(|e| io::Error::other(e.to_string()))?;
    }
    Ok(out)
}

fn draw(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel) -> Drawn {
    let ratio = |time: Nanos| time.0 as f64 / panel.unplanned.1.0.max(1) as f64;
    let all = || panel.curves.iter().flat_map(|c| &c.points).chain(&panel.bound);
    let widest = all().map(|p| p.0.0).max().unwrap_or(0).max(panel.unplanned.0.0).max(1);
    let slowest = all().map(|p| ratio(p.1)).fold(1.0, f64::max);
    let memory = Scale::new(widest, &SIZES, 8);
    // Some room above, so that the edge hides nothing.
    let top = if slowest > HIGHEST { HIGHEST } else { (slowest - 1.0).mul_add(1.1, 1.02) };
    let bottom = 1.0 - (top - 1.0) * 0.03;

    let entries = entries(panel);
    let below_title = entries.last().map_or(0, |e| e.y) + 29;
    let mut chart = ChartBuilder::on(area)
        .margin_top(below_title)
        .margin_right(24)
        .margin_left(18)
        .margin_bottom(10)
        .set_label_area_size(LabelAreaPosition::Left, 58)
        .set_label_area_size(LabelAreaPosition::Bottom, 42)
        .build_cartesian_2d(
            Axis { scale: &memory, highest: widest.saturating_add(widest / 32) },
            bottom..top,
        )?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(FAINT)
        .x_labels(16)
        .y_labels(8)
        .y_label_formatter(&|ratio| format!("{ratio:.2}"))
        .label_style(font(12, &FAINT))
        .axis_desc_style(font(12, &INK))
        .x_desc(format!("peak ({})", memory.unit))
        .y_desc("time / unplanned time")
        .draw()?;

    let place = |&(bytes, time): &(Bytes, Nanos)| (memory.units(bytes.0), ratio(time).min(top));
    chart.draw_series(DashedLineSeries::new(
        panel.bound.iter().map(place),
        6,
        4,
        INK.stroke_width(1),
    ))?;
    for (curve, colour) in panel.curves.iter().zip(COLOURS.iter().cycle()) {
        let exact: Vec<(f64, f64)> =
            curve.points.iter().map(|p| (memory.units(p.0.0), ratio(p.1))).collect();
        for line in below(&exact, top) {
            chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?;
        }
        let (within, beyond): (Vec<_>, Vec<_>) =
            curve.points.iter().partition(|p| ratio(p.1) <= top);
        chart.draw_series(within.into_iter().map(|p| Circle::new(place(p), 4, colour.filled())))?;
        chart.draw_series(
            beyond.iter().map(|p| TriangleMarker::new(place(p), 6, colour.filled())),
        )?;
        chart.draw_series(beyond.iter().map(|p| {
            EmptyElement::at(place(p))
                + Text::new(format!("{:.2}", ratio(p.1)), (8, -6), font(11, colour))
        }))?;
    }
    let unplanned = place(&panel.unplanned);
    chart.draw_series([Cross::new(unplanned, 5, INK.stroke_width(2))])?;
    legend(area, panel, entries)
}

/// The parts of a line that are not above `top`.
fn below(points: &[(f64, f64)], top: f64) -> Vec<Vec<(f64, f64)>> {
    let mut parts: Vec<Vec<(f64, f64)>> = Vec::new();
    for pair in points.windows(2) {
        let (a, b) = (pair[0], pair[1]);
        let crossing = || (a.0 + (b.0 - a.0) * (top - a.1) / (b.1 - a.1), top);
        let part = match (a.1 <= top, b.1 <= top) {
            (true, true) => vec![a, b],
            (true, false) => vec![a, crossing()],
            (false, true) => vec![crossing(), b],
            (false, false) => continue,
        };
        match parts.last_mut() {
            Some(last) if last.last() == Some(&a) => last.extend_from_slice(&part[1..]),
            _ => parts.push(part),
        }
    }
    parts
}

/// A name in the legend, its colour and its place.
struct Entry {
    text: String,
    colour: RGBColor,
    x: i32,
    y: i32,
}

/// Distance between the legend's lines in pixels.
const LINE: i32 = 18;

/// The entries for the curves and then for the black marks, on as many lines as needed.
fn entries(panel: &Panel) -> Vec<Entry> {
    let name = |curve: &Curve| {
        if curve.points.is_empty() {
            format!("{} (no plan)", curve.name)
        } else {
            curve.name.clone()
        }
    };
    let curves = panel
        .curves
        .iter()
        .zip(COLOURS.iter().cycle())
        .map(|(curve, colour)| (name(curve), *colour));
    let (mut x, mut y) = (76, 43);
    let place = |(name, colour): (String, RGBColor)| {
        let text = cut(&name, 40);
        // The approximate width of sans-serif letters of this size.
        let width = 21 + text.chars().count() as i32 * 13 / 2;
        if x + width > WIDTH as i32 - 24 {
            (x, y) = (76, y + LINE);
        }
        let at = x;
        x += width + 26;
        Entry { text, colour, x: at, y }
    };
    curves.chain([("bound (dashed), unplanned (cross)".to_owned(), INK)]).map(place).collect()
}

/// Writes the title, and below it each curve's name behind a swatch of its colour.
fn legend(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel, entries: Vec<Entry>) -> Drawn {
    area.draw(&Text::new(cut(&panel.title, 90), (76, 14), font(17, &INK)))?;
    for Entry { text, colour, x, y } in entries {
        area.draw(&Rectangle::new([(x, y + 1), (x + 14, y + 11)], colour.filled()))?;
        area.draw(&Text::new(text, (x + 21, y), font(12, &INK)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_where_they_leave_the_picture() {
        let line = [(0.0, 4.0), (1.0, 3.0), (2.0, 1.0), (3.0, 1.0), (4.0, 3.0), (5.0, 9.0)];
        assert_eq!(below(&line, 2.0), [[(1.5, 2.0), (2.0, 1.0), (3.0, 1.0), (3.5, 2.0)]]);
        assert!(below(&line[..2], 2.0).is_empty() && below(&line[2..3], 2.0).is_empty());
    }

    #[test]
    fn panels_have_every_curve_and_odd_input_is_no_panic() {
        let curve = |name: &str, points: &[(u64, u64)]| Curve {
            name: name.to_owned(),
            points: points.iter().map(|&(b, t)| (Bytes(b << 20), Nanos(t))).collect(),
        };
        let panel = Panel {
            title: "a <job> on b".to_owned(),
            unplanned: (Bytes(100 << 20), Nanos(1_000)),
            curves: vec![
                curve("slow", &[(40, 9_870), (90, 1_500)]),
                curve("quick", &[(50, 1_100)]),
                curve("none", &[]),
            ],
            bound: vec![(Bytes(10 << 20), Nanos(1_010)), (Bytes(100 << 20), Nanos(1_000))],
        };
        let drawn = svg(&[panel.clone(), panel.clone()]).unwrap();
        assert_eq!(drawn, svg(&[panel.clone(), panel.clone()]).unwrap());
        for part in [
            "a &lt;job&gt; on b",
            "slow",
            "quick",
            "none (no plan)",
            "9.87",
            "peak (MiB)",
            "height=\"840\"",
            "</svg>",
        ] {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
        assert!(
            !svg(&[Panel {
                unplanned: (Bytes(0), Nanos(0)),
                curves: vec![],
                bound: vec![],
                ..panel
            }])
            .unwrap()
            .is_empty()
        );
        assert!(svg(&[]).unwrap().contains("</svg>"));
    }
}
