//! The share of items done by each time, as SVG: one rising line for each series.

use std::io;

use plotters::prelude::*;

use super::curve::{
    Area, COLUMNS, Drawn, INK, LEFT, Scale, TIMES, TOP, cut, document, font, frame,
};
use crate::units::Nanos;

/// Okabe and Ito's colours, which the colour-blind can tell apart.
const COLOURS: [RGBColor; 6] = [
    RGBColor(150, 150, 150),
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
];

const PERCENT: [(&str, u64); 1] = [("%", 1)];

/// Draws, for each named series of sorted times, the share of them up to each instant.
///
/// # Errors
/// When the drawing library fails. It gives no reason when it draws into memory.
pub fn svg(title: &str, what: &str, series: &[(String, Vec<Nanos>)]) -> io::Result<String> {
    document(|root| draw(root, title, what, series))
}

fn draw(root: &Area<'_>, title: &str, what: &str, series: &[(String, Vec<Nanos>)]) -> Drawn {
    let end = series.iter().filter_map(|s| s.1.last()).map(|t| t.0).max().unwrap_or(0).max(1);
    let (time, share) = (Scale::new(end, &TIMES, 8), Scale::new(100, &PERCENT, 5));
    let across = format!("{what} ({})", time.unit);
    let mut chart = frame(root, TOP, &across, "share of jobs (%)", (&time, end), (&share, 104))?;
    let mut x = LEFT as i32;
    root.draw(&Text::new(cut(title, 90), (x, 14), font(17, &INK)))?;
    for ((name, times), colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let mut corners = vec![(0.0, 0.0)];
        let mut shown = None;
        for (done, at) in times.iter().enumerate() {
            // One point for each pixel column, the last; the corner before it keeps the step.
            let column = u128::from(at.0) * u128::from(COLUMNS) * 2 / u128::from(end);
            let next = times
                .get(done + 1)
                .map(|t| u128::from(t.0) * u128::from(COLUMNS) * 2 / u128::from(end));
            if next == Some(column) && shown == Some(column) {
                continue;
            }
            shown = Some(column);
            let height = (done + 1) as f64 * 100.0 / times.len() as f64;
            corners.push((time.units(at.0), corners.last().map_or(0.0, |c| c.1)));
            corners.push((time.units(at.0), height));
        }
        chart.draw_series(LineSeries::new(corners, colour.stroke_width(2)))?;
        root.draw(&Rectangle::new([(x, 46), (x + 14, 50)], colour.filled()))?;
        let text = cut(name, 28);
        let width = text.chars().count() as i32 * 13 / 2;
        root.draw(&Text::new(text, (x + 21, 43), font(12, &INK)))?;
        x += 21 + width + 26;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_named_and_odd_input_draws() {
        let times: Vec<Nanos> = (1..=20_000).map(|n| Nanos(n * 1_000_000)).collect();
        let series = [("fifo".to_owned(), times), ("none".to_owned(), Vec::new())];
        let drawn = svg("jobs <&>", "time", &series).unwrap();
        for part in ["jobs &lt;&amp;&gt;", "fifo", "none", "share of jobs", "</svg>"] {
            assert!(drawn.contains(part), "{part}");
        }
        assert!(drawn.len() < 200_000, "{}", drawn.len());
        assert!(svg("", "", &[("x".to_owned(), vec![Nanos(u64::MAX)])]).is_ok());
    }
}
