//! How the peak depends on the sizes of what the script calls its models with: what was seen, and
//! what follows from it for other sizes.
//!
//! Each phase's peak is taken to be a polynomial of second degree in the sizes that vary, fitted to
//! the steps that were seen: what is saved grows with their products, attention's scores with their
//! squares. The peak of a size is that of its highest phase. How far that is off in the steps that
//! were seen is said beside each prediction.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use neap::report::curve::{self, Across, Curve, Line};
use neap::report::table::{Side, Table};
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use super::At;
use super::found::Process;
use crate::output::note;

/// A prediction that is further off than this share of what was seen, in thousandths, is none.
const FURTHEST: u64 = 50;
/// The largest size that is asked whether it fits, in multiples of the largest that was seen.
const REACH: u64 = 8;
/// Points of a drawn curve.
const POINTS: u64 = 200;

/// A step: its sizes, and the peak of each phase.
struct Seen<'p> {
    sizes: &'p [u64],
    phases: BTreeMap<&'p str, u64>,
}

impl Seen<'_> {
    fn peak(&self) -> u64 {
        self.phases.values().copied().max().unwrap_or(0)
    }
}

/// What is known of a run's sizes.
pub struct Sizes<'p> {
    names: &'p [String],
    seen: Vec<Seen<'p>>,
    fits: Vec<Fit>,
    /// The most by which a prediction for a step that was seen is off, in thousandths.
    off: u64,
    /// What the run reserved, and what it allocated, at most.
    reserved: (u64, u64),
}

impl<'p> Sizes<'p> {
    /// Those of a process whose models were called with several sizes. The first step, which makes
    /// the optimizer's states, and what comes after the last one are not counted.
    pub fn new(process: &'p Process) -> Option<Self> {
        let extents = &process.extents;
        let mut peaks: BTreeMap<u64, BTreeMap<&str, u64>> = BTreeMap::new();
        for (step, phase, peak) in &process.step_peaks {
            peaks.entry(*step).or_default().insert(phase, *peak);
        }
        let whole = extents.steps.iter().filter(|(step, _)| (1..process.steps).contains(step));
        let seen: Vec<Seen<'_>> = whole
            .filter_map(|(step, sizes)| Some(Seen { sizes, phases: peaks.get(step)?.clone() }))
            .collect();
        if extents.names.is_empty() || seen.len() < 2 {
            return None;
        }
        let allocated = process.step_peaks.iter().map(|(_, _, peak)| *peak).max().unwrap_or(0);
        let reserved = (process.peak_reserved().0, allocated.max(1));
        let mut found = Self { names: &extents.names, seen, fits: Vec::new(), off: 0, reserved };
        found.fit();
        Some(found)
    }

    /// Fits each phase; leaves it where one does not follow from the sizes.
    fn fit(&mut self) {
        let phases: BTreeSet<&str> =
            self.seen.iter().flat_map(|seen| seen.phases.keys().copied()).collect();
        let of = |phase: &str| {
            let rows = self.seen.iter().filter_map(|s| Some((s.sizes, *s.phases.get(phase)?)));
            Fit::new(&rows.collect::<Vec<_>>())
        };
        let Some(fits) = phases.iter().map(|phase| of(phase)).collect::<Option<Vec<_>>>() else {
            return;
        };
        self.fits = fits;
        let off = self.seen.iter().map(|seen| {
            let (peak, found) = (seen.peak().max(1), self.allocated(seen.sizes));
            (peak.abs_diff(found) * 1000).div_ceil(peak)
        });
        self.off = off.max().unwrap_or(0);
        if self.off > FURTHEST {
            self.fits.clear();
        }
    }

    /// Whether other sizes can be predicted.
    const fn predicts(&self) -> bool {
        !self.fits.is_empty()
    }

    /// The bytes allocated at the peak of a step with these sizes.
    fn allocated(&self, sizes: &[u64]) -> u64 {
        self.fits.iter().map(|fit| fit.at(sizes)).max().unwrap_or(0)
    }

    /// The bytes reserved for it, if the allocator keeps as much free as in this run, and the
    /// prediction is as far off as it was at most.
    fn reserved(&self, sizes: &[u64]) -> u64 {
        let most = u128::from(self.allocated(sizes)) * u128::from(1000 + self.off) / 1000;
        let (reserved, allocated) = self.reserved;
        let bytes = most * u128::from(reserved) / u128::from(allocated);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// What was reserved beyond what was allocated, in words.
    fn beyond(&self) -> String {
        let (reserved, allocated) = self.reserved;
        format!("{} %", (reserved.saturating_sub(allocated) * 100).div_ceil(allocated))
    }

    /// The largest size that fits into `available` bytes, where one size varies; nothing where even
    /// [`REACH`] times what was seen would.
    fn most_that_fits(&self, available: Bytes) -> Option<u64> {
        let [_] = self.names else { return None };
        let largest = self.seen.iter().map(|seen| seen.sizes[0]).max()?;
        let fits = |size: u64| self.reserved(&[size]) <= available.0;
        if !self.predicts() || fits(largest * REACH) || !fits(1) {
            return None;
        }
        let (mut low, mut high) = (1, largest * REACH);
        while high - low > 1 {
            let middle = u64::midpoint(low, high);
            if fits(middle) { low = middle } else { high = middle }
        }
        Some(low)
    }

    /// The table for people: the smallest, the median and the largest size that were seen, and
    /// those that were asked for.
    pub fn table(&self, asked: Option<&At>, device: &str, available: Bytes) -> String {
        let mut table = Table::new(&[
            (&self.names.join(" x "), Side::Right),
            ("allocated", Side::Right),
            ("reserved", Side::Right),
            ("", Side::Left),
        ]);
        let mut rows: Vec<&Seen<'_>> = self.seen.iter().collect();
        rows.sort_by_key(|seen| (seen.peak(), seen.sizes));
        let last = rows.len() - 1;
        for (place, what) in [(0, "least seen"), (last / 2, "median"), (last, "most seen")] {
            let (sizes, peak) = (written(rows[place].sizes), Bytes(rows[place].peak()));
            table.row([sizes, peak.to_string(), String::new(), what.to_owned()]);
        }
        let off = Off(self.off);
        if let Some(sizes) = self.predicted(asked) {
            let [allocated, reserved] =
                [self.allocated(sizes), self.reserved(sizes)].map(|bytes| Bytes(bytes).to_string());
            let what = format!("predicted, within {off} in the steps seen");
            table.row([written(sizes), allocated, reserved, what]);
        }
        let mut text = format!("\n{table}");
        if let Some(most) = self.most_that_fits(available) {
            text.push_str(&format!(
                "By these, up to {most} fit on {device}. This is predicted: within {off} in the {} \
                 steps seen,\nif the allocator reserves {} beyond what is allocated, as in this \
                 run.\n",
                self.seen.len(),
                self.beyond(),
            ));
        }
        text
    }

    /// The sizes that were asked for, if they can be predicted.
    fn predicted<'a>(&self, asked: Option<&'a At>) -> Option<&'a [u64]> {
        let found = asked.filter(|at| self.predicts() && self.takes(at))?;
        Some(&found.0)
    }

    /// Whether these are as many sizes as vary.
    fn takes(&self, asked: &At) -> bool {
        asked.0.len() == self.names.len()
    }

    /// The same for programs.
    pub fn form(&self, asked: Option<&At>, available: Bytes) -> Value {
        let step = |s: &Seen<'_>| json!({"sizes": s.sizes, "peak_allocated_bytes": s.peak()});
        json!({
            "names": self.names,
            "seen": self.seen.iter().map(step).collect::<Vec<_>>(),
            "off_by_thousandths": self.predicts().then_some(self.off),
            "predicted": self.predicted(asked).map(|sizes| json!({
                "sizes": sizes,
                "peak_allocated_bytes": self.allocated(sizes),
                "peak_reserved_bytes": self.reserved(sizes),
            })),
            "most_that_fits": self.most_that_fits(available),
        })
    }

    /// Draws peak over size, where one size varies, with the device's limit.
    ///
    /// # Errors
    /// When several vary, nothing follows, or the file can't be written.
    pub fn plot(
        &self,
        asked: Option<&At>,
        (device, available): (&str, Bytes),
        to: &Path,
    ) -> anyhow::Result<()> {
        let ([name], true) = (self.names, self.predicts()) else {
            let names = self.names.join(", ");
            anyhow::bail!(
                "--plot-sizes: the peak does not follow from one size that varies ({names})"
            );
        };
        let seen = self.seen.iter().map(|seen| seen.sizes[0]).max().unwrap_or(1);
        let most = self.most_that_fits(available).unwrap_or(seen);
        let end = asked.map_or(0, |At(sizes)| sizes[0]).max(seen).max(most + most / 8);
        let at = |point: u64| (point * end / POINTS).max(1);
        let predicted: Vec<(Nanos, Bytes)> = (0..=POINTS)
            .map(|point| (Nanos(at(point)), Bytes(self.reserved(&[at(point)]))))
            .collect();
        let mut measured: BTreeMap<u64, u64> = BTreeMap::new();
        for seen in &self.seen {
            let most = measured.entry(seen.sizes[0]).or_insert(0);
            *most = seen.peak().max(*most);
        }
        let measured: Vec<_> =
            measured.into_iter().map(|(size, peak)| (Nanos(size), Bytes(peak))).collect();
        let curves = [
            Curve { name: "reserved, predicted", points: &predicted },
            Curve { name: "allocated, seen", points: &measured },
        ];
        let limit = [Line { name: device, value: available }];
        let title = format!("peak by {name}");
        let picture = curve::svg_across(Across::Sizes, &title, &curves, &limit)?;
        neap::files::write(to, |file| file.write_all(picture.as_bytes()))?;
        note(&format!("written: {}", to.display()));
        Ok(())
    }
}

/// Why nothing is known of sizes.
pub const ONE: &str = "the script called its models with one size only";

/// Why nothing is predicted for the sizes that were asked for, if so.
pub fn why_not(sizes: Option<&Sizes<'_>>, asked: &At) -> Option<String> {
    let Some(sizes) = sizes else { return Some(format!("--at: {ONE}")) };
    let (names, steps) = (sizes.names.join(", "), sizes.seen.len());
    match sizes.names.len() {
        _ if sizes.takes(asked) && sizes.predicts() => None,
        _ if sizes.takes(asked) => Some(format!(
            "--at: the peaks of the {steps} steps seen do not follow from {names}; run more steps"
        )),
        1 => Some(format!("--at: 1 size varies ({names}); give one")),
        count => Some(format!("--at: {count} sizes vary ({names}); give as many, as in 16x512")),
    }
}

fn written(sizes: &[u64]) -> String {
    sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ")
}

/// A share in thousandths as percent.
struct Off(u64);

impl std::fmt::Display for Off {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{} %", self.0 / 10, self.0 % 10)
    }
}

/// A polynomial in sizes.
struct Fit {
    /// The degree, 0 to 2.
    degree: usize,
    /// What each size is divided by.
    unit: Vec<f64>,
    coefficients: Vec<f64>,
}

impl Fit {
    /// The one of the highest degree that the rows determine with two to spare, by least squares.
    fn new(rows: &[(&[u64], u64)]) -> Option<Self> {
        let distinct: BTreeSet<&[u64]> = rows.iter().map(|row| row.0).collect();
        let count = rows.first()?.0.len();
        let unit = (0..count).map(|n| rows.iter().map(|r| r.0[n]).max().unwrap_or(1).max(1) as f64);
        let unit: Vec<f64> = unit.collect();
        for degree in [2, 1] {
            if distinct.len() < terms(degree, &unit, &unit).len() + 2 {
                continue;
            }
            let solve = || {
                let line = |&(sizes, peak): &(&[u64], u64)| {
                    (terms(degree, &floats(sizes), &unit), peak as f64)
                };
                least_squares(&rows.iter().map(line).collect::<Vec<_>>())
            };
            if let Some(coefficients) = solve() {
                return Some(Self { degree, unit, coefficients });
            }
        }
        None
    }

    fn at(&self, sizes: &[u64]) -> u64 {
        let terms = terms(self.degree, &floats(sizes), &self.unit);
        let sum: f64 = terms.iter().zip(&self.coefficients).map(|(t, c)| t * c).sum();
        sum.clamp(0.0, 9e18) as u64
    }
}

fn floats(sizes: &[u64]) -> Vec<f64> {
    sizes.iter().map(|&size| size as f64).collect()
}

/// 1, each size, and from the second degree on each product of two.
fn terms(degree: usize, sizes: &[f64], unit: &[f64]) -> Vec<f64> {
    let scaled: Vec<f64> = sizes.iter().zip(unit).map(|(size, unit)| size / unit).collect();
    let mut found = vec![1.0];
    found.extend(&scaled);
    if degree > 1 {
        for (n, a) in scaled.iter().enumerate() {
            found.extend(scaled[n..].iter().map(|b| a * b));
        }
    }
    found
}

/// The coefficients that come nearest to the rows, by the normal equations; nothing if they are not
/// determined.
fn least_squares(rows: &[(Vec<f64>, f64)]) -> Option<Vec<f64>> {
    let count = rows.first()?.0.len();
    let mut matrix = vec![vec![0.0; count + 1]; count];
    for (terms, value) in rows {
        for (n, line) in matrix.iter_mut().enumerate() {
            for (cell, term) in line.iter_mut().zip(terms.iter().chain([value])) {
                *cell += terms[n] * term;
            }
        }
    }
    for column in 0..count {
        let best = (column..count)
            .max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()))?;
        matrix.swap(column, best);
        let pivot = matrix[column].clone();
        if pivot[column].abs() < 1e-9 * rows.len() as f64 {
            return None;
        }
        for (_, line) in matrix.iter_mut().enumerate().filter(|(row, _)| *row != column) {
            let factor = line[column] / pivot[column];
            line.iter_mut().zip(&pivot).for_each(|(cell, own)| *cell -= factor * own);
        }
    }
    Some((0..count).map(|n| matrix[n][count] / matrix[n][n]).collect())
}

#[cfg(test)]
mod tests {
    use super::super::found::{DeviceUse, Extents};
    use super::*;

    /// Steps of a script whose forward saves `a + b n + c n²` bytes and whose optimizer needs 5000.
    fn process(sizes: &[u64], more: impl Fn(usize) -> u64) -> Process {
        let peaks = sizes.iter().enumerate().flat_map(|(n, &size)| {
            let backward = 1000 + 7 * size + size * size / 4 + more(n);
            [(n as u64, "backward".to_owned(), backward), (n as u64, "step".to_owned(), 5000)]
        });
        Process {
            steps: sizes.len() as u64,
            extents: Extents {
                names: vec!["x.shape[1]".to_owned()],
                steps: (0..).zip(sizes).map(|(n, &size)| (n, vec![size])).collect(),
            },
            step_peaks: peaks.collect(),
            devices: vec![DeviceUse { peak_reserved_bytes: 5500, ..DeviceUse::default() }],
            ..Process::default()
        }
    }

    const SEEN: [u64; 8] = [80, 100, 40, 60, 88, 20, 72, 52];

    #[test]
    fn other_sizes_follow() {
        let process = process(&SEEN, |_| 0);
        let sizes = Sizes::new(&process).unwrap();
        assert!(sizes.predicts() && sizes.off <= 1, "{}", sizes.off);
        assert!(sizes.allocated(&[400]).abs_diff(43_800) <= 2, "{}", sizes.allocated(&[400]));
        // Small sizes peak in the step.
        assert!(sizes.allocated(&[10]).abs_diff(5000) <= 2);
        // 1.1 times what is allocated, as of the 5000 bytes of a step.
        let most = sizes.most_that_fits(Bytes(50_000)).unwrap();
        assert!((406..=413).contains(&most), "{most}");
        assert!(sizes.reserved(&[most]) <= 50_000 && sizes.reserved(&[most + 1]) > 50_000);
        assert_eq!(sizes.most_that_fits(Bytes(u64::MAX)), None);
        let table = sizes.table(Some(&At(vec![400])), "card", Bytes(50_000));
        assert!(table.contains("predicted, within") && table.contains("fit on card"), "{table}");
        assert!(why_not(Some(&sizes), &At(vec![4, 4])).unwrap().contains("give one"));
    }

    #[test]
    fn what_does_not_follow_is_not_predicted() {
        let process = process(&SEEN, |n| if n % 2 == 0 { 3000 } else { 0 });
        let sizes = Sizes::new(&process).unwrap();
        assert!(!sizes.predicts() && sizes.most_that_fits(Bytes(50_000)).is_none());
        assert!(why_not(Some(&sizes), &At(vec![400])).unwrap().contains("do not follow"));
        let few = self::process(&SEEN[..4], |_| 0);
        assert!(!Sizes::new(&few).unwrap().predicts());
    }

    #[test]
    fn sizes_are_read() {
        use super::super::at;
        assert_eq!(at("16x512"), Ok(At(vec![16, 512])));
        for bad in ["", "x", "0", "-1", "1x", "99999999999"] {
            assert!(at(bad).is_err(), "{bad}");
        }
    }
}
