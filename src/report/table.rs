//! Aligned tables of plain text: words are left-aligned, numbers right-aligned.
//!
//! They have no colours, no frame and no trailing blanks, so that they look the same in a terminal,
//! in a file and in a README.

use std::fmt;

use comfy_table::{CellAlignment, TableStyle};

use super::plain;

/// A table to which rows are added. Its `Display` is the finished text, ending in a newline.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Side)>,
    rows: Vec<Vec<String>>,
}

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

impl Table {
    /// A table with these column headings and no rows yet.
    #[must_use]
    pub fn new(columns: &[(&str, Side)]) -> Self {
        Self {
            columns: columns.iter().map(|(name, side)| (plain(name).into_owned(), *side)).collect(),
            rows: Vec::new(),
        }
    }

    /// As [`Table::new`], from headings between `|`. Those of words begin with `<`.
    #[must_use]
    pub fn headed(headings: &str) -> Self {
        let column = |heading: &'_ str| match heading.strip_prefix('<') {
            Some(words) => (plain(words).into_owned(), Side::Left),
            None => (plain(heading).into_owned(), Side::Right),
        };
        Self { columns: headings.split('|').map(column).collect(), rows: Vec::new() }
    }

    /// Adds a row with a cell for each column. Missing cells stay empty, surplus cells are dropped.
    pub fn row<T: fmt::Display>(&mut self, cells: impl IntoIterator<Item = T>) -> &mut Self {
        let mut row: Vec<_> = cells
            .into_iter()
            .take(self.columns.len())
            .map(|cell| plain(&cell.to_string()).into_owned())
            .collect();
        row.resize(self.columns.len(), String::new());
        self.rows.push(row);
        self
    }

    /// Whether it has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = comfy_table::Table::new();
        table.load_style(TableStyle::new());
        table.set_header(self.columns.iter().map(|(name, _)| name));
        for (index, (_, side)) in self.columns.iter().enumerate() {
            if let Some(column) = table.column_mut(index) {
                column.set_padding((0, 2));
                column.set_cell_alignment(if *side == Side::Left {
                    CellAlignment::Left
                } else {
                    CellAlignment::Right
                });
            }
        }
        let rule = |index: usize| {
            let widths = self
                .rows
                .iter()
                .map(|row| &row[index])
                .chain([&self.columns[index].0])
                .map(|cell| width(cell));
            "-".repeat(widths.max().unwrap_or(0))
        };
        table.add_row((0..self.columns.len()).map(rule));
        for row in &self.rows {
            table.add_row(row);
        }
        writeln!(f, "{}", table.trim_fmt())
    }
}

/// Every character counts as one cell wide, which is close enough for the rule below a heading.
fn width(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_to_the_left_numbers_to_the_right() {
        let mut table = Table::headed("<planner|peak|<note");
        assert!(table.is_empty());
        table.row(["tensile", "4.50 GiB", ""]).row(["none", "10 µs"]).row([
            "é\u{1b}[1m",
            "1",
            "x",
            "left out",
        ]);
        let want = "\
planner      peak  note
-------  --------  ----
tensile  4.50 GiB
none        10 µs
é\u{fffd}[1m           1  x
";
        assert_eq!(table.to_string(), want);
    }

    #[test]
    fn numbers_need_no_converting() {
        let mut table = Table::new(&[("n", Side::Right), ("square", Side::Right)]);
        table.row([9, 81]).row([10, 100]);
        assert_eq!(table.to_string(), " n  square\n--  ------\n 9      81\n10     100\n");
    }
}
