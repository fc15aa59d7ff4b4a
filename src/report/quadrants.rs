//! The xMem paper's four-quadrant plot as SVG: the rate of failures against the error of estimates.
//!
//! Each model is a point: horizontally the share of its runs that failed, vertically the median of
//! its relative errors. Lines at 20 % separate the quadrants: lower left is optimal, lower right
//! accurate but failing (underestimates), upper left safe but wasteful (overestimates), upper right
//! neither. The same input gives the same bytes.

use std::fmt::Write as _;

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

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 74.0;
const BOTTOM: f64 = 56.0;
/// The line between quadrants, in percent, as in the paper.
const EDGE: f64 = 20.0;
/// Errors above this are drawn at the top.
const MOST: f64 = 1000.0;

const INK: &str = "#262626";
const FAINT: &str = "#6e6e6e";
/// Okabe and Ito's blue and vermilion.
const OURS: &str = "#0072b2";
const THEIRS: &str = "#d55e00";

/// Draws `points` as dots and `published` as hollow squares with their names.
#[must_use]
pub fn svg(title: &str, points: &[Point<'_>], published: &[Point<'_>]) -> String {
    let percent =
        |share: f64| if share.is_finite() { (share * 100.0).clamp(0.0, MOST) } else { MOST };
    let highest =
        points.iter().chain(published).map(|p| percent(p.error)).fold(2.0 * EDGE, f64::max);
    let step = [10.0, 20.0, 50.0, 100.0].into_iter().find(|s| highest / s <= 10.0).unwrap_or(200.0);
    let top = (highest / step).ceil() * step;
    let x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * value / 100.0;
    let y = |value: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top;
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>"
    );
    let quadrants = [
        (0.0, 0.0, EDGE, EDGE, "#0072b2", "optimal"),
        (EDGE, 0.0, 100.0, EDGE, "#e69f00", "accurate, but fails"),
        (0.0, EDGE, EDGE, top, "#56b4e9", "safe, but wasteful"),
        (EDGE, EDGE, 100.0, top, "#d55e00", "neither"),
    ];
    for (x0, y0, x1, y1, colour, name) in quadrants {
        let (left, up, wide, high) = (x(x0), y(y1), x(x1) - x(x0), y(y0) - y(y1));
        let _ = writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{up:.1}\" width=\"{wide:.1}\" height=\"{high:.1}\" fill=\"{colour}\" fill-opacity=\"0.1\"/>"
        );
        text(&mut out, x(x1) - 6.0, y(y1) + 16.0, "end", FAINT, name);
    }
    for value in (0..=10).map(|n| f64::from(n) * 10.0) {
        text(&mut out, x(value), HEIGHT - BOTTOM + 18.0, "middle", FAINT, &format!("{value}"));
    }
    for n in 0..=(top / step).round() as u32 {
        let value = f64::from(n) * step;
        text(&mut out, LEFT - 8.0, y(value) + 4.0, "end", FAINT, &format!("{value}"));
    }
    let edges = [(x(EDGE), y(0.0), x(EDGE), y(top)), (x(0.0), y(EDGE), x(100.0), y(EDGE))];
    for (x0, y0, x1, y1) in edges {
        let _ = writeln!(
            out,
            "<path d=\"M{x0:.1} {y0:.1}L{x1:.1} {y1:.1}\" stroke=\"{INK}\" stroke-dasharray=\"6 4\"/>"
        );
    }
    let at = |p: &Point<'_>| (x(percent(p.failure).min(100.0)), y(percent(p.error)));
    let mut labels = Vec::new();
    for point in points {
        let (across, up) = at(point);
        let said = format!(
            "{}: {:.2} % off in the median, {:.1} % of runs fail",
            point.name,
            point.error * 100.0,
            point.failure * 100.0
        );
        let _ = writeln!(
            out,
            "<circle cx=\"{across:.1}\" cy=\"{up:.1}\" r=\"5\" fill=\"{OURS}\" fill-opacity=\"0.45\" stroke=\"{OURS}\"><title>{}</title></circle>",
            escape(&said)
        );
        if percent(point.failure) > EDGE || percent(point.error) > EDGE {
            labels.push((across, up, INK, point.name));
        }
    }
    for point in published {
        let (across, up) = at(point);
        let (left, above) = (across - 4.5, up - 4.5);
        let _ = writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{above:.1}\" width=\"9\" height=\"9\" fill=\"none\" stroke=\"{THEIRS}\" stroke-width=\"2\"/>"
        );
        labels.push((across, up, THEIRS, point.name));
    }
    names(&mut out, labels);
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"30\" font-size=\"17\" fill=\"{INK}\">{}</text>",
        escape(title)
    );
    let models =
        if points.len() == 1 { "1 model".to_owned() } else { format!("{} models", points.len()) };
    text(
        &mut out,
        LEFT,
        54.0,
        "start",
        INK,
        &format!("dots: {models}, each the median over its jobs; squares: published"),
    );
    text(&mut out, x(50.0), HEIGHT - 14.0, "middle", INK, "runs that fail the two-round check (%)");
    let middle = (HEIGHT - BOTTOM + TOP) / 2.0;
    let _ = writeln!(
        out,
        "<text transform=\"translate(22 {middle}) rotate(-90)\" text-anchor=\"middle\" fill=\"{INK}\">median relative error of the reserved peak (%)</text>\n</svg>"
    );
    out
}

/// Writes names beside their points, from the lowest up. A name that would cover another is moved
/// up.
fn names(out: &mut String, mut labels: Vec<(f64, f64, &str, &str)>) {
    labels.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.total_cmp(&b.0)).then(a.3.cmp(b.3)));
    let mut taken: Vec<(f64, f64)> = Vec::new();
    for (x, up, colour, name) in labels {
        let mut y = up;
        while taken.iter().any(|(tx, ty)| (tx - x).abs() < 150.0 && (ty - y).abs() < 13.0) {
            y -= 1.0;
        }
        taken.push((x, y));
        // Names near the right edge are written to the left of their point.
        let (x, anchor) = if x > WIDTH * 0.7 { (x - 9.0, "end") } else { (x + 9.0, "start") };
        text(out, x, y + 4.0, anchor, colour, name);
    }
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, colour: &str, what: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{}</text>",
        escape(what)
    );
}

fn escape(text: &str) -> String {
    plain(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_stand_in_their_quadrants() {
        let point = |name, failure, error| Point { name, failure, error };
        let ours = [point("good", 0.0, 0.0), point("b<a>d", 0.5, 0.4)];
        let drawn = svg("a title", &ours, &[point("xMem, published", 0.095, 0.037)]);
        assert_eq!(drawn, svg("a title", &ours, &[point("xMem, published", 0.095, 0.037)]));
        assert!(drawn.contains("cx=\"70.0\" cy=\"464.0\""), "the origin: {drawn}");
        assert!(drawn.contains("cx=\"383.0\" cy=\"74.0\""), "the middle, at the top: {drawn}");
        assert!(
            drawn.contains(">b&lt;a&gt;d</text>") && !drawn.contains(">good</text>"),
            "only what stands out is named: {drawn}"
        );
        assert!(drawn.ends_with("</svg>\n"));
    }

    #[test]
    fn odd_figures_stay_on_the_paper() {
        let drawn = svg("", &[Point { name: "", failure: 7.0, error: f64::INFINITY }], &[]);
        assert!(drawn.contains("cx=\"696.0\" cy=\"74.0\""), "{drawn}");
        assert!(!svg("", &[], &[]).contains("NaN"));
    }
}
