//! The iteration of a fitted script without and with its plan: both curves, what is copied and run
//! again below them, and a row for each thing that the plan moves.

use std::cmp::Reverse;

use neap::plan::script::course::{Course, Kind as What, Thing, What as Does};
use neap::report::page::{self, Cell, Chart, Kind, Lane, Limit, Span, Table};
use neap::units::Bytes;

use crate::before_after;

/// The budget of a plan, and what it was to leave of it to the allocator, in bytes.
#[derive(Clone, Copy)]
pub struct Room {
    pub budget: u64,
    pub margin: u64,
}

/// The chart of a course and its tables; nothing if the course is of another version.
pub fn drawn(text: &str, room: Room) -> Option<(Chart, Vec<Table>)> {
    let course = Course::read(text)?;
    let mut curves = [
        ("without a plan", course.unplanned.points()?),
        ("with the plan", course.planned.points()?),
    ];
    let end_of = |points: &[(u64, u64)]| points.last().map_or(0, |point| point.0);
    let end = curves.iter().map(|(_, points)| end_of(points)).max().unwrap_or(0);
    for (_, points) in &mut curves {
        // The shorter curve ends where its iteration does.
        let own = end_of(points);
        if own < end {
            points.push((own, 0));
        }
    }
    let mut values = page::Course::of_curves(&curves);
    values.end_at(end);
    let chart = Chart {
        name: "Memory of one iteration".to_owned(),
        course: values,
        limits: vec![Limit { name: "budget".to_owned(), value: room.budget }],
        lanes: lanes(&course),
        ..Chart::default()
    };
    let tables = [Some(moved(&course, room)), before_after::waits(&chart)];
    let tables = tables.into_iter().flatten().filter(|table| !table.rows.is_empty()).collect();
    Some((chart, tables))
}

fn lanes(course: &Course) -> Vec<Lane> {
    let waits = course.waits.iter().map(|(name, from, long)| Span {
        name: format!("before {name}"),
        kind: "lost",
        from: *from,
        until: from.saturating_add(*long),
        bytes: None,
    });
    let does = |wanted: Does, kind: &'static str| {
        let spans = course.things.iter().flat_map(move |thing| {
            let own = thing.spans.iter().filter(move |span| span.0 == wanted);
            own.map(move |&(_, from, long)| Span {
                name: thing.name.clone(),
                kind,
                from,
                until: from.saturating_add(long),
                bytes: (wanted != Does::Again).then_some(Bytes(thing.bytes)),
            })
        });
        spans.collect::<Vec<_>>()
    };
    let compute = does(Does::Again, "recompute").into_iter().chain(waits).collect();
    let all = [
        ("compute", compute),
        ("to the host", does(Does::Out, "out")),
        ("from it", does(Does::In, "in")),
    ];
    all.into_iter()
        .filter(|(_, spans)| !spans.is_empty())
        .map(|(name, mut spans)| {
            spans.sort_by_key(|span| (span.from, Reverse(span.until)));
            Lane { name: name.to_owned(), spans }
        })
        .collect()
}

/// A row for each thing that moves or runs again.
fn moved(course: &Course, room: Room) -> Table {
    let row = |thing: &Thing| -> Vec<Cell> {
        let took = thing.spans.iter().map(|span| span.2).fold(0, u64::saturating_add);
        let what = match thing.kind {
            What::Activation => "activation, to the host",
            What::State => "optimizer state, to the host",
            What::Parameters => "parameters, to the host",
            What::Again => "runs again",
        };
        vec![
            thing.name.as_str().into(),
            (!thing.module.is_empty()).then_some(thing.module.as_str()).into(),
            what.into(),
            thing.bytes.into(),
            thing.away_ns.into(),
            took.into(),
            (thing.else_bytes > 0).then_some(thing.else_bytes).into(),
            why(thing.else_bytes, room).into(),
        ]
    };
    let (shown, count) = (course.things.len(), course.count);
    let largest =
        if shown < count { format!(": the largest {shown} of {count}") } else { String::new() };
    Table {
        name: format!("What the plan moves and runs again{largest}"),
        columns: vec![
            ("name", Kind::Text),
            ("module", Kind::Text),
            ("what", Kind::Text),
            ("bytes", Kind::Bytes),
            ("away", Kind::Nanos),
            ("copies, or again", Kind::Nanos),
            ("if it stayed", Kind::Bytes),
            ("why", Kind::Text),
        ],
        rows: course.things.iter().map(row).collect(),
    }
}

/// What the bytes that would stand if one thing stayed say of the budget.
fn why(bytes: u64, room: Room) -> Option<String> {
    let left = room.budget.saturating_sub(bytes);
    if bytes == 0 {
        None
    } else if bytes > room.budget {
        Some(format!("the peak would be {} over the budget", Bytes(bytes - room.budget)))
    } else if left < room.margin {
        let (left, margin) = (Bytes(left), Bytes(room.margin));
        Some(format!("the allocator would have {left} to spare, not {margin}"))
    } else {
        Some("only together with others".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const MIB: u64 = 1 << 20;

    fn text() -> String {
        let thing = |name: &str, kind: &str, bytes: u64, other: u64, spans: Value| {
            json!({
                "name": name, "module": "layers.<b>0", "kind": kind, "bytes": bytes,
                "away_ns": 50, "else_bytes": other, "spans": spans,
            })
        };
        json!({
            "unplanned": { "at": [0, 40, 60], "bytes": [10, 90, 0] },
            "planned": { "at": [0, 40, 90], "bytes": [10, 50, 0] },
            "things": [
                thing("<script>", "activation", 30 * MIB, 90 * MIB, json!([["out", 5, 9], ["in", 60, 9]])),
                thing("addmm_3", "again", MIB, 61 * MIB, json!([["again", 70, 4]])),
                thing("exp_avg:w", "state", MIB, 20 * MIB, json!([["in", 80, 4]])),
                thing("p", "parameters", MIB, 0, json!([])),
            ],
            "count": 9,
            "waits": [["addmm_4", 90, 8]],
        })
        .to_string()
    }

    #[test]
    fn curves_lanes_and_rows_are_those_of_the_course() {
        let room = Room { budget: 64 * MIB, margin: 8 * MIB };
        let (chart, tables) = drawn(&text(), room).unwrap();
        let form = serde_json::to_value(chart).unwrap();
        assert_eq!(form["lines"], json!(["without a plan", "with the plan"]));
        // The unplanned iteration ends at 100, the planned at 130.
        let peaks = json!([
            { "name": "without a plan", "at": 40, "value": 100 },
            { "name": "with the plan", "at": 40, "value": 60 },
        ]);
        assert_eq!((&form["peaks"], &form["end"]), (&peaks, &json!(130)));
        assert_eq!(form["limits"][0], json!({ "name": "budget", "value": 64 * MIB }));
        let lanes: Vec<&str> =
            form["lanes"].as_array().unwrap().iter().map(|l| l["name"].as_str().unwrap()).collect();
        assert_eq!(lanes, ["compute", "to the host", "from it"]);
        assert_eq!(form["lanes"][1]["spans"][0]["name"], "<script>");
        assert_eq!(form["lanes"][1]["spans"][0]["bytes"], 30 * MIB);
        assert_eq!(tables[0].name, "What the plan moves and runs again: the largest 4 of 9");
        let last = |row: usize| serde_json::to_value(&tables[0].rows[row]).unwrap()[7].clone();
        assert_eq!(last(0), "the peak would be 26.0 MiB over the budget");
        assert_eq!(last(1), "the allocator would have 3.0 MiB to spare, not 8.0 MiB");
        assert_eq!(last(2), "only together with others");
        assert_eq!(last(3), Value::Null);
        assert_eq!(tables[1].name, "Where operators wait");
    }

    #[test]
    fn what_is_of_another_version_is_not_drawn() {
        let room = Room { budget: 1, margin: 0 };
        let damages: [fn(&mut Value); 4] = [
            |form| form["unplanned"]["at"] = json!([1]),
            |form| form["planned"]["bytes"] = json!([-1, 0, 0]),
            |form| form["things"][0]["kind"] = json!("other"),
            |form| form["more"] = json!(1),
        ];
        for damage in damages {
            let mut form: Value = serde_json::from_str(&text()).unwrap();
            damage(&mut form);
            assert!(drawn(&form.to_string(), room).is_none(), "{form}");
        }
        assert!(drawn("", room).is_none());
    }
}
