//! What a fitted script reports, as a page: one iteration without and with the plan, peaks against
//! the budget, and its iterations.

use std::collections::BTreeMap;

use anyhow::Context;
use neap::report::page::{self, Cell, Kind, Page, Table, View};
use neap::units::Bytes;
use serde::Deserialize;
use serde_json::Value;

use super::curves::{self, Room};

/// Why there is a plan, and no curve of it.
const NO_CURVES: &str = "The plan's curves are not known: another version of neap made the plan.";

/// What comes on stdin.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Told {
    pub title: String,
    /// `neap.torch.Report` as an object.
    pub report: Value,
}

/// The part of a report that has a place of its own on the page.
#[derive(Deserialize)]
struct Report {
    budget_bytes: u64,
    unplanned_peak_bytes: u64,
    predicted_peak_bytes: u64,
    peak_allocated_bytes: u64,
    peak_reserved_bytes: u64,
    planned: u64,
    unplanned: BTreeMap<String, u64>,
    kinds: Vec<Alike>,
    notes: Vec<String>,
    replans: Vec<String>,
    #[serde(default)]
    margin_bytes: u64,
    /// What is drawn; empty without a plan, or of a plan that an earlier version made.
    #[serde(default)]
    course: String,
}

/// Iterations in which autograd saved as many tensors.
#[derive(Deserialize)]
struct Alike {
    saved_tensors: i64,
    iterations: u64,
    by_plan: u64,
    on_demand: u64,
    over: u64,
    least_bytes: u64,
    median_bytes: u64,
    most_bytes: u64,
}

/// The page of reports, one of each process that trained; its figures are the first's.
///
/// # Errors
/// When a report is of another version.
pub fn from_reports(title: String, mut reports: Vec<Value>) -> anyhow::Result<Page> {
    let read = |value: &Value| Report::deserialize(value).context("a report of neap.torch");
    let all = reports.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
    let alone = all.len() == 1;
    let view = |(index, report): (usize, &Report)| {
        let (charts, moved) = report.drawn().unzip();
        View {
            name: if alone { "within the budget".into() } else { format!("process {}", index + 1) },
            about: "What the plan predicts, what was measured since it acts, and how iterations \
                    ran."
                .to_owned(),
            charts: charts.into_iter().collect(),
            tables: report.tables().into_iter().chain(moved.into_iter().flatten()).collect(),
        }
    };
    let notes = |report: &Report| {
        let again = report.replans.iter().map(|why| format!("Planned anew: {why}."));
        let lacks = report.predicted_peak_bytes > 0 && report.drawn().is_none();
        let lacks = lacks.then(|| NO_CURVES.to_owned());
        report.notes.iter().cloned().chain(again).chain(lacks).collect::<Vec<_>>()
    };
    // It is drawn, and no figure.
    if let Some(Value::Object(report)) = reports.first_mut() {
        report.remove("course");
    }
    Ok(Page {
        title,
        command: "neap torch",
        notes: all.iter().flat_map(notes).collect(),
        views: all.iter().enumerate().map(view).collect(),
        report: reports.into_iter().next().unwrap_or_default(),
    })
}

impl Report {
    /// The curves, and the tables of what moves.
    fn drawn(&self) -> Option<(page::Chart, Vec<Table>)> {
        let room = Room { budget: self.budget_bytes, margin: self.margin_bytes };
        curves::drawn(&self.course, room)
    }

    fn tables(&self) -> Vec<Table> {
        let all = [self.peaks(), self.ways(), self.alike()];
        all.into_iter().filter(|table| !table.rows.is_empty()).collect()
    }

    fn peaks(&self) -> Table {
        let all = [
            ("budget", self.budget_bytes),
            ("predicted without the plan", self.unplanned_peak_bytes),
            ("predicted with the plan", self.predicted_peak_bytes),
            ("measured, allocated", self.peak_allocated_bytes),
            ("measured, reserved", self.peak_reserved_bytes),
        ];
        let row = |(name, bytes): (&str, u64)| {
            let share = page::share(Bytes(bytes), Bytes(self.budget_bytes));
            vec![Cell::from(name), bytes.into(), share.into()]
        };
        Table {
            name: "Peaks".to_owned(),
            columns: vec![
                ("", Kind::Text),
                ("bytes", Kind::Bytes),
                ("share of the budget", Kind::Share),
            ],
            // What was not measured, as on the CPU, is 0.
            rows: all.into_iter().filter(|(_, bytes)| *bytes > 0).map(row).collect(),
        }
    }

    fn ways(&self) -> Table {
        let unplanned = self
            .unplanned
            .iter()
            .map(|(why, count)| vec![Cell::from(format!("without it: {why}")), (*count).into()]);
        let planned = vec!["by the plan".into(), self.planned.into()];
        Table {
            name: "Iterations".to_owned(),
            columns: vec![("how they ran", Kind::Text), ("iterations", Kind::Count)],
            rows: std::iter::once(planned).chain(unplanned).collect(),
        }
    }

    fn alike(&self) -> Table {
        let row = |one: &Alike| {
            let saved = u64::try_from(one.saved_tensors).ok();
            let counts = [one.iterations, one.by_plan, one.on_demand, one.over];
            let bytes = [one.least_bytes, one.median_bytes, one.most_bytes];
            let numbers = counts.into_iter().chain(bytes).map(Cell::from);
            std::iter::once(saved.into()).chain(numbers).collect()
        };
        Table {
            name: "Kinds of iterations, by what autograd saved".to_owned(),
            columns: vec![
                ("saved tensors", Kind::Count),
                ("iterations", Kind::Count),
                ("by the plan", Kind::Count),
                ("on demand", Kind::Count),
                ("over the budget", Kind::Count),
                ("least saved", Kind::Bytes),
                ("median", Kind::Bytes),
                ("most", Kind::Bytes),
            ],
            rows: self.kinds.iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn peaks_stand_beside_the_budget() {
        let report = json!({
            "budget_bytes": 1000, "unplanned_peak_bytes": 2000, "predicted_peak_bytes": 900,
            "peak_allocated_bytes": 0, "peak_reserved_bytes": 950, "planned": 7, "met": true,
            "unplanned": { "it was <b>watched</b>": 3 }, "notes": ["a note"], "replans": ["larger"],
            "kinds": [{ "saved_tensors": -1, "iterations": 10, "by_plan": 7, "on_demand": 0,
                        "over": 0, "least_bytes": 5, "median_bytes": 6, "most_bytes": 7 }],
        });
        let page = from_reports("fit".to_owned(), vec![report.clone()]).unwrap();
        let page = serde_json::to_value(page).unwrap();
        assert_eq!(page["report"], report);
        assert_eq!(page["notes"], json!(["a note", "Planned anew: larger.", NO_CURVES]));
        assert_eq!(page["views"][0]["charts"], json!([]));
        let tables = &page["views"][0]["tables"];
        assert_eq!(tables[0]["rows"][1], json!(["predicted without the plan", 2000, 2000]));
        assert_eq!(tables[0]["rows"].as_array().unwrap().len(), 4);
        assert_eq!(tables[1]["rows"][1], json!(["without it: it was <b>watched</b>", 3]));
        assert_eq!(tables[2]["rows"][0], json!([null, 10, 7, 0, 0, 5, 6, 7]));
        assert!(from_reports(String::new(), vec![json!({ "budget_bytes": 1 })]).is_err());
    }

    #[test]
    fn the_course_is_drawn_and_no_figure() {
        let course = json!({
            "unplanned": { "at": [0, 9], "bytes": [2000, 0] }, "count": 0, "things": [],
            "planned": { "at": [0, 10], "bytes": [900, 0] }, "waits": [],
        });
        let report = json!({
            "budget_bytes": 1000, "unplanned_peak_bytes": 2000, "predicted_peak_bytes": 900,
            "peak_allocated_bytes": 0, "peak_reserved_bytes": 0, "planned": 7, "unplanned": {},
            "notes": [], "replans": [], "kinds": [], "course": course.to_string(),
        });
        let page =
            serde_json::to_value(from_reports(String::new(), vec![report]).unwrap()).unwrap();
        assert_eq!(page["report"]["course"], Value::Null);
        assert_eq!(page["notes"], json!([]));
        let peaks = &page["views"][0]["charts"][0]["peaks"];
        assert_eq!((&peaks[0]["value"], &peaks[1]["value"]), (&json!(2000), &json!(900)));
    }
}
