//! The xMem paper's four-quadrant plot as SVG: the rate of failures against the error of estimates.
//!
//! Each model is a point: horizontally the share of its runs that failed, vertically the median of
//! its relative errors. Lines at 20 % separate the quadrants: lower left is optimal, lower right
//! accurate but failing (underestimates), upper left safe but wasteful (overestimates), upper right
//! neither. The same input gives the same bytes.

use std::io;

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::curve::{FAINT, INK, font};
use super::plain;

/// A model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point<'a> {
    /// Its name.
    pub name: &'a str,
    /// The share of runs that failed, 0 to 1.
    pub failure: f64,
    /// The median of the relative errors, 0.01 for one percent.
    pub error: f64,
}

const WIDTH: u32 = 720;
const HEIGHT: u32 = 520;
const LEFT: u32 = 70;
const RIGHT: u32 = 24;
const TOP: u32 = 74;
const BOTTOM: u32 = 56;
/// The line between quadrants, in percent, as in the paper.
const EDGE: f64 = 20.0;
/// Errors above this are drawn at the top.
const MOST: f64 = 1000.0;

/// Okabe and Ito's blue and vermilion.
const OURS: RGBColor = RGBColor(0, 114, 178);
const THEIRS: RGBColor = RGBColor(213, 94, 0);

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Draws `points` as dots and `published` as hollow squares. Those that are not optimal, and all
/// that are published, have their names beside them.
///
/// # Errors
/// When the drawing library fails. It gives no reason when it draws into memory.
pub fn svg(title: &str, points: &[Point<'_>], published: &[Point<'_>]) -> io::Result<String> {
    let mut out = String::new();
    {
        let root = SVGBackend::with_string(&mut out, (WIDTH, HEIGHT)).into_drawing_area();
        let drawn = draw(&root, title, points, published).and_then(|()| root.present());
        drawn.map_err(|e| io::Error::other(e.to_string()))?;
    }
    Ok(out)
}

/// A share in percent, at most as high as is drawn.
fn percent(share: f64) -> f64 {
    if share.is_finite() { (share * 100.0).clamp(0.0, MOST) } else { MOST }
}

fn draw(root: &Area<'_>, title: &str, points: &[Point<'_>], published: &[Point<'_>]) -> Drawn {
    root.fill(&WHITE)?;
    let all = points.iter().chain(published);
    let highest = all.map(|p| percent(p.error)).fold(2.0 * EDGE, f64::max);
    let step = [10.0, 20.0, 50.0, 100.0].into_iter().find(|s| highest / s <= 10.0);
    let step = step.unwrap_or(200.0);
    let top = (highest / step).ceil() * step;
    let mut chart = ChartBuilder::on(root)
        .margin_top(TOP)
        .margin_right(RIGHT)
        .margin_left(14)
        .margin_bottom(10)
        .set_label_area_size(LabelAreaPosition::Left, LEFT - 14)
        .set_label_area_size(LabelAreaPosition::Bottom, BOTTOM - 10)
        .build_cartesian_2d(0.0..100.0, 0.0..top)?;
    quadrants(root, &mut chart, top)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .axis_style(FAINT)
        .x_labels(11)
        .y_labels((top / step).round() as usize + 1)
        .label_style(font(12, &FAINT))
        .axis_desc_style(font(12, &INK))
        .x_desc("runs that fail the two-round check (%)")
        .y_desc("median relative error of the reserved peak (%)")
        .draw()?;

    let at = |p: &Point<'_>| (percent(p.failure).min(100.0), percent(p.error));
    chart.draw_series(points.iter().map(|p| Circle::new(at(p), 5, OURS.mix(0.45).filled())))?;
    chart.draw_series(points.iter().map(|p| Circle::new(at(p), 5, OURS.stroke_width(1))))?;
    chart.draw_series(published.iter().map(|p| {
        EmptyElement::at(at(p)) + Rectangle::new([(-4, -4), (5, 5)], THEIRS.stroke_width(2))
    }))?;
    let stands_out = |p: &&Point<'_>| percent(p.failure) > EDGE || percent(p.error) > EDGE;
    let ours = points.iter().filter(stands_out).map(|p| (p, &INK));
    let labels = ours.chain(published.iter().map(|p| (p, &THEIRS)));
    let labels = labels.map(|(p, colour)| (chart.backend_coord(&at(p)), colour, p.name));
    names(root, labels.collect())?;
    head(root, title, points.len())
}

/// Tints and names the quadrants, and draws the lines between them.
fn quadrants(root: &Area<'_>, chart: &mut Chart<'_>, top: f64) -> Drawn {
    let quadrants = [
        (0.0, 0.0, EDGE, EDGE, OURS, "optimal"),
        (EDGE, 0.0, 100.0, EDGE, RGBColor(230, 159, 0), "accurate, but fails"),
        (0.0, EDGE, EDGE, top, RGBColor(86, 180, 233), "safe, but wasteful"),
        (EDGE, EDGE, 100.0, top, THEIRS, "neither"),
    ];
    for (left, bottom, right, up, colour, name) in quadrants {
        let corners = [(left, bottom), (right, up)];
        chart.draw_series([Rectangle::new(corners, colour.mix(0.1).filled())])?;
        let (x, y) = chart.backend_coord(&(right, up));
        let style = font(12, &FAINT).pos(Pos::new(HPos::Right, VPos::Top));
        root.draw(&Text::new(name, (x - 6, y + 6), style))?;
    }
    for edge in [[(EDGE, 0.0), (EDGE, top)], [(0.0, EDGE), (100.0, EDGE)]] {
        chart.draw_series(DashedLineSeries::new(edge, 6, 4, INK.stroke_width(1)))?;
    }
    Ok(())
}

/// Writes the title, and what the marks are.
fn head(root: &Area<'_>, title: &str, models: usize) -> Drawn {
    let left = LEFT as i32;
    let count = if models == 1 { "1 model".to_owned() } else { format!("{models} models") };
    let marks = format!("dots: {count}, each the median over its jobs; squares: published");
    root.draw(&Text::new(plain(title).into_owned(), (left, 16), font(17, &INK)))?;
    root.draw(&Text::new(marks, (left, 44), font(12, &INK)))
}

/// Writes names beside their points, from the lowest up. A name that would cover another is moved
/// up.
fn names(root: &Area<'_>, mut labels: Vec<((i32, i32), &RGBColor, &str)>) -> Drawn {
    labels.sort_by_key(|&((x, y), _, name)| (std::cmp::Reverse(y), x, name.to_owned()));
    let mut taken: Vec<(i32, i32)> = Vec::new();
    for ((x, up), colour, name) in labels {
        let mut y = up;
        while taken.iter().any(|(tx, ty)| (tx - x).abs() < 150 && (ty - y).abs() < 13) {
            y -= 1;
        }
        taken.push((x, y));
        // Names near the right edge are written to the left of their point.
        let (x, side) =
            if x > WIDTH as i32 * 7 / 10 { (x - 9, HPos::Right) } else { (x + 9, HPos::Left) };
        let style = font(12, colour).pos(Pos::new(side, VPos::Center));
        root.draw(&Text::new(plain(name).into_owned(), (x, y), style))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_stand_in_their_quadrants() {
        let point = |name, failure, error| Point { name, failure, error };
        let ours = [point("good", 0.0, 0.0), point("b<a>d", 0.5, 0.4)];
        let theirs = [point("xMem, published", 0.095, 0.037)];
        let drawn = svg("a title", &ours, &theirs).unwrap();
        assert_eq!(drawn, svg("a title", &ours, &theirs).unwrap());
        assert!(drawn.contains("cx=\"70\" cy=\"463\""), "the origin: {drawn}");
        assert!(drawn.contains("cx=\"382\" cy=\"74\""), "the middle, at the top: {drawn}");
        assert!(
            drawn.contains("b&lt;a&gt;d") && !drawn.contains("good"),
            "only what stands out is named: {drawn}"
        );
        assert!(drawn.ends_with("</svg>\n"));
    }

    #[test]
    fn odd_figures_stay_on_the_paper() {
        let odd = Point { name: "", failure: 7.0, error: f64::INFINITY };
        let drawn = svg("", &[odd], &[]).unwrap();
        assert!(drawn.contains("cx=\"695\" cy=\"74\""), "{drawn}");
        assert!(!svg("", &[], &[]).unwrap().contains("NaN"));
    }
}
