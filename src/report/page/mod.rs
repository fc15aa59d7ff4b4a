//! A page to look at: one HTML file that shows a result as charts and tables.
//!
//! The file needs no network: style, script and the plotting library are in it, and the data is
//! embedded as JSON, from which the script builds everything. Texts of the data reach the page as
//! text only, never as markup. The script is `data.js`, `chart.js`, `living.js`, `lanes.js` and
//! `page.js` in this order; `page.html` holds them together.

mod blocks;
mod course;
mod memory;

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::Value;

pub use blocks::{Blocks, Label};
pub use course::Course;
pub use memory::Memory;

use crate::units::{Bytes, Nanos};

/// The frame of a page, with `@names@` where parts go.
const FRAME: &str = include_str!("page.html");
const PARTS: [(&str, &str); 7] = [
    ("@license@", include_str!("uplot/LICENSE")),
    ("@uplot.css@", include_str!("uplot/uPlot.min.css")),
    ("@page.css@", include_str!("page.css")),
    ("@uplot.js@", include_str!("uplot/uPlot.iife.min.js")),
    ("@data.js@", include_str!("data.js")),
    (
        "@chart.js@",
        concat!(include_str!("chart.js"), include_str!("living.js"), include_str!("lanes.js")),
    ),
    ("@page.js@", include_str!("page.js")),
];

/// A page: a result and its views.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Page {
    /// What the page is about, such as a file and a device.
    pub title: String,
    /// The command that made it, such as `neap replay`.
    pub command: &'static str,
    /// What `--json` prints: the page's figures are read from it.
    pub report: Value,
    /// Sentences about what the figures assume.
    pub notes: Vec<String>,
    /// One tab each.
    pub views: Vec<View>,
}

/// A tab of a page. Its charts share one horizontal axis.
#[derive(Clone, Debug, Default, Serialize)]
pub struct View {
    /// The tab's name.
    pub name: String,
    /// What it shows, in a sentence.
    pub about: String,
    /// From top to bottom.
    pub charts: Vec<Chart>,
    /// Below the charts.
    pub tables: Vec<Table>,
}

/// What a position on a chart's horizontal axis counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Across {
    /// Nanoseconds.
    #[default]
    Time,
    /// Requests to an allocator.
    Requests,
}

/// What a chart's values are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Bytes.
    #[default]
    Bytes,
    /// A number of things.
    Count,
}

/// Values over time or requests: layers on top of each other, and lines.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Chart {
    /// Its heading.
    pub name: String,
    /// The horizontal axis.
    pub across: Across,
    /// The values.
    pub unit: Unit,
    /// The values, in levels of detail.
    #[serde(flatten)]
    pub course: Course,
    /// Horizontal lines, such as a device's memory.
    pub limits: Vec<Limit>,
    /// Where steps and phases begin.
    pub marks: Vec<Mark>,
    /// Rows of spans below the curve.
    pub lanes: Vec<Lane>,
    /// What the layers consist of, where that is known.
    pub blocks: Option<Blocks>,
}

/// A level that should not be exceeded.
#[derive(Clone, Debug, Serialize)]
pub struct Limit {
    /// Its name.
    pub name: String,
    /// The level.
    pub value: u64,
}

/// The beginning of a step or phase.
#[derive(Clone, Debug, Serialize)]
pub struct Mark {
    /// The position.
    pub at: u64,
    /// The name, such as `step 2` or `forward`.
    pub name: String,
    /// Whether a step begins, within which phases follow.
    pub step: bool,
}

/// A row of spans.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Lane {
    /// Its name.
    pub name: String,
    /// In order of their start.
    pub spans: Vec<Span>,
}

/// Something that takes a while.
#[derive(Clone, Debug, Serialize)]
pub struct Span {
    /// Its label.
    pub name: String,
    /// What it is, by which it is coloured: `operator`, `recompute`, `out`, `in`, `lost`, `waiting`
    /// or `running`.
    pub kind: &'static str,
    /// First position.
    pub from: u64,
    /// The position after its last.
    pub until: u64,
    /// The bytes that it moves, where it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
}

/// A table.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Table {
    /// Its heading.
    pub name: String,
    /// Head and kind of each column.
    pub columns: Vec<(&'static str, Kind)>,
    /// Each as long as `columns`.
    pub rows: Vec<Vec<Cell>>,
}

/// How a column is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// As it is.
    Text,
    /// With a unit, and in bytes.
    Bytes,
    /// With a unit.
    Nanos,
    /// A whole number.
    Count,
    /// A bar: a part per mille of a whole, over which it may be.
    Share,
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Cell {
    /// A text.
    Text(String),
    /// A number.
    Number(i64),
    /// Unknown, or of no meaning here.
    Nothing,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<u64> for Cell {
    fn from(number: u64) -> Self {
        Self::Number(number.try_into().unwrap_or(i64::MAX))
    }
}

impl From<Bytes> for Cell {
    fn from(bytes: Bytes) -> Self {
        bytes.0.into()
    }
}

impl From<Nanos> for Cell {
    fn from(time: Nanos) -> Self {
        time.0.into()
    }
}

impl<T: Into<Self>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Nothing, Into::into)
    }
}

impl Page {
    /// The HTML document. The same page gives the same bytes.
    ///
    /// # Errors
    /// When the data can't be written as JSON.
    pub fn html(&self) -> serde_json::Result<String> {
        // A `<` of JSON is within a string: as an escape it can't end the element around the data.
        let data = serde_json::to_string(self)?.replace('<', "\\u003c");
        let title = markup(&self.title);
        let mut out = String::with_capacity(data.len() + FRAME.len() + (1 << 17));
        let mut rest = FRAME;
        let data = ("@data@", data.as_str());
        let own = [("@title@", title.as_str()), ("@version@", env!("CARGO_PKG_VERSION")), data];
        while let Some(at) = rest.find('@') {
            out.push_str(&rest[..at]);
            let parts = own.iter().chain(&PARTS);
            let mut found = parts.filter(|(name, _)| rest[at..].starts_with(name));
            let (name, text) = found.next().copied().unwrap_or(("@", "@"));
            out.push_str(text);
            rest = &rest[at + name.len()..];
        }
        out.push_str(rest);
        Ok(out)
    }
}

/// A part of a whole per mille, for a column of [`Kind::Share`]; `None` of nothing.
#[must_use]
pub fn share(part: Bytes, whole: Bytes) -> Option<u64> {
    (u128::from(part.0) * 1000).checked_div(whole.0.into())?.try_into().ok()
}

/// A text as content of an element.
fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' | '>' | '&' | '"' | '\'' => {
                // Writing to a String cannot fail.
                let _ = write!(out, "&#{};", u32::from(character));
            }
            _ => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(html: &str) -> Value {
        let (_, after) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
        let (data, _) = after.split_once("</script>").unwrap();
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn hostile_texts_stay_texts() {
        let hostile = "</script><script>alert(1)</script><!-- @data@ ' \" & \u{2028}";
        let mut blocks = Blocks::default();
        blocks.begin(0, 0, Bytes(512), 0, Label { name: hostile.into(), ..Label::default() });
        let chart = Chart { blocks: Some(blocks), ..Chart::default() };
        let view = View { name: hostile.into(), charts: vec![chart], ..View::default() };
        let page = Page {
            title: hostile.into(),
            report: serde_json::json!({ hostile: hostile }),
            views: vec![view],
            ..Page::default()
        };
        let html = page.html().unwrap();
        // The frame's own two: the data and the script.
        assert_eq!(html.matches("</script>").count(), 2);
        assert_eq!(html.matches("<script").count(), 2);
        assert!(!html.contains("alert(1)</script>"));
        let data = data(&html);
        assert_eq!(data["title"], hostile);
        assert_eq!(data["report"][hostile], hostile);
        assert_eq!(data["views"][0]["charts"][0]["blocks"]["labels"][0]["name"], hostile);
    }

    #[test]
    fn a_page_needs_nothing_from_elsewhere() {
        let html = Page::default().html().unwrap();
        assert!(html.starts_with("<!doctype html>"));
        assert!(html.contains("default-src 'none'"));
        for part in PARTS.iter().map(|(name, _)| name).chain(&["@title@", "@data@", "@version@"]) {
            assert!(FRAME.contains(part) && !html.contains(part), "{part}");
        }
        for source in [" src=", " href=", "url(", "@import", "fetch("] {
            assert!(!html.contains(source), "{source}");
        }
        assert!(html.len() < 100_000, "{}", html.len());
        assert_eq!(html, Page::default().html().unwrap());
    }
}
