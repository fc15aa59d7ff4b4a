//! The files of `neap score`: a row for each job, and the four-quadrant plot.

use neap::estimate::score::{self, BARE, Fate, Group, MARGIN, Options, Score};
use neap::report::quadrants::{self, Point};

use super::{PUBLISHED, on_the_papers};

/// Writes a row for each job.
pub fn csv(
    scores: &[Score],
    options: &Options,
    out: &mut dyn std::io::Write,
) -> std::io::Result<()> {
    let mut rows = csv::Writer::from_writer(out);
    rows.write_record([
        "job",
        "model",
        "peak_reserved_bytes",
        "estimated_peak_reserved_bytes",
        "reserved_error",
        "peak_allocated_bytes",
        "estimated_peak_allocated_bytes",
        "allocated_error",
        "margin_bytes",
        "capped_peak_reserved_bytes",
        "capped_error",
        "runs",
        "failed",
        "failed_with_margin",
        "conserved_bytes",
        "conserved_with_margin_bytes",
        "lenient_conserved_bytes",
        "lenient_conserved_with_margin_bytes",
        "conserved_on_the_papers_devices_bytes",
        "conserved_with_margin_on_the_papers_devices_bytes",
        "elapsed_ns",
    ])?;
    for s in scores {
        let fate = Fate::new(&s.runs);
        let papers = on_the_papers(std::slice::from_ref(s), options);
        let papers = |with| papers.and_then(|fate| fate.mcp(with));
        let size = |mcp: Option<i64>| mcp.map_or_else(String::new, |b| b.to_string());
        rows.write_record([
            s.name.clone(),
            s.model.clone(),
            s.actual.reserved.0.to_string(),
            s.estimated.reserved.0.to_string(),
            format!("{:.6}", s.reserved_error()),
            s.actual.allocated.0.to_string(),
            s.estimated.allocated.0.to_string(),
            format!("{:.6}", s.allocated_error()),
            s.margin.0.to_string(),
            s.capped.map_or_else(String::new, |peak| peak.0.to_string()),
            s.capped_error().map_or_else(String::new, |error| format!("{error:.6}")),
            fate.runs.to_string(),
            fate.failed[BARE].to_string(),
            fate.failed[MARGIN].to_string(),
            size(fate.mcp(BARE)),
            size(fate.mcp(MARGIN)),
            size(fate.lenient_mcp(BARE)),
            size(fate.lenient_mcp(MARGIN)),
            size(papers(BARE)),
            size(papers(MARGIN)),
            s.elapsed_ns.to_string(),
        ])?;
    }
    rows.flush()
}

/// Draws each model's failures and error.
///
/// # Errors
/// When the drawing library fails.
pub fn plot(title: &str, scores: &[Score]) -> std::io::Result<String> {
    let groups = score::by(scores, |s| s.model.clone());
    let point = |g: &'_ Group| (g.name.clone(), g.fate.failure(BARE), g.error.median);
    let ours: Vec<(String, Option<f64>, f64)> = groups.iter().map(point).collect();
    // A model without events has no horizontal position.
    let points: Vec<Point<'_>> = ours
        .iter()
        .filter_map(|(name, failure, error)| {
            Some(Point { name, failure: (*failure)?, error: *error })
        })
        .collect();
    let names: Vec<String> = PUBLISHED.iter().map(|p| format!("{}, published", p.name)).collect();
    let published: Vec<Point<'_>> = PUBLISHED
        .iter()
        .zip(&names)
        .filter_map(|(p, name)| {
            Some(Point {
                name,
                failure: f64::from(p.failure?) / 1000.0,
                error: f64::from(p.error) / 1000.0,
            })
        })
        .collect();
    quadrants::svg(title, &points, &published)
}
