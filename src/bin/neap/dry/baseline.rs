//! `--baseline`: the run's peak against that of an earlier run, as a gate in CI.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, bail};
use neap::report::table::Table;
use neap::units::Bytes;
use serde_json::{Value, json};

use super::found::LARGEST;

/// The places that are named.
const PLACES: usize = 12;
/// A share of all, in thousandths of a per cent.
const ALL: u128 = 100_000;

/// What `neap dry --json` said of an earlier run.
pub struct Baseline {
    name: String,
    device: String,
    peaks: Peaks,
}

/// A run's peaks, and what stood at that of what was allocated.
#[derive(Default)]
struct Peaks {
    reserved: u64,
    allocated: u64,
    categories: BTreeMap<String, u64>,
    /// Bytes of the largest blocks by category and the name or line of each.
    places: BTreeMap<(String, String), u64>,
}

impl Baseline {
    /// Reads a report.
    ///
    /// # Errors
    /// When the file is not the report of a run that ended well.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let text = neap::files::read(path, LARGEST)?;
        let form: Value = serde_json::from_slice(&text)
            .with_context(|| format!("{name}: is not JSON; `neap dry --json` writes baselines"))?;
        let Some(device) = form["device"].as_str().filter(|_| form["processes"].is_array()) else {
            bail!("{name}: is no report of a dry run; `neap dry --json` writes baselines");
        };
        if form["outcome"] != "fits" {
            bail!(
                "{name}: its run did not end well, so it has no peak to compare with; run it again"
            );
        }
        let Some(peaks) = Peaks::from_report(&form) else {
            bail!("{name}: has no peak of what is reserved; write it anew with `neap dry --json`");
        };
        Ok(Self { device: device.to_owned(), peaks, name })
    }

    /// Refuses to compare runs on different devices, since these run different kernels.
    ///
    /// # Errors
    /// When the baseline is of another device.
    pub fn must_be_of(&self, device: &str) -> anyhow::Result<()> {
        if self.device == device {
            return Ok(());
        }
        bail!(
            "{}: is of the device {}, and this run is on {device}; give --device {}",
            self.name,
            self.device,
            self.device
        )
    }

    /// Compares a run's report with it. `tolerance` is in thousandths of a per cent.
    ///
    /// # Errors
    /// When the report has no peak of what is reserved.
    pub fn against(&self, form: &Value, tolerance: u64) -> anyhow::Result<Growth<'_>> {
        let now =
            Peaks::from_report(form).context("the run has no peak to compare with the baseline")?;
        let most = u128::from(self.peaks.reserved) * (ALL + u128::from(tolerance)) / ALL;
        Ok(Growth { before: self, grew: u128::from(now.reserved) > most, now })
    }
}

impl Peaks {
    /// Nothing where the report has no peak of what is reserved.
    fn from_report(form: &Value) -> Option<Self> {
        let mut found = Self {
            reserved: form["peak_reserved_bytes"].as_u64()?,
            allocated: form["peak_allocated_bytes"].as_u64()?,
            ..Self::default()
        };
        let peak = &form["processes"][0]["peak"];
        for (category, bytes) in peak["categories"].as_object().into_iter().flatten() {
            found.categories.insert(category.clone(), bytes.as_u64()?);
        }
        for block in peak["blocks"].as_array().into_iter().flatten() {
            let category = block["category"].as_str().unwrap_or_default().to_owned();
            let place = block["name"].as_str().or(block["line"].as_str()).unwrap_or("-").to_owned();
            *found.places.entry((category, place)).or_default() += block["bytes"].as_u64()?;
        }
        Some(found)
    }
}

/// A run beside its baseline.
pub struct Growth<'a> {
    before: &'a Baseline,
    now: Peaks,
    /// Whether the peak of what is reserved grew by more than is tolerated.
    pub grew: bool,
}

impl Growth<'_> {
    /// Peaks, categories at the peak and, where the peak grew, the places that grew most.
    pub fn table(&self) -> String {
        let mut table = Table::headed("<against the baseline|<category|before|now|growth");
        for (what, category, before, now) in self.rows() {
            let sign = if now < before { "-" } else { "+" };
            let growth = format!("{sign}{}", Bytes(now.abs_diff(before)));
            table.row([what, category, Bytes(before).to_string(), Bytes(now).to_string(), growth]);
        }
        table.to_string()
    }

    fn rows(&self) -> Vec<(String, String, u64, u64)> {
        let (before, now) = (&self.before.peaks, &self.now);
        let row = |what: &str, a, b| (what.to_owned(), String::new(), a, b);
        let mut rows = vec![
            row("peak reserved", before.reserved, now.reserved),
            row("peak allocated", before.allocated, now.allocated),
        ];
        let changed = joined(&before.categories, &now.categories);
        rows.extend(
            changed.into_iter().map(|(name, a, b)| ("at the peak".to_owned(), name.clone(), a, b)),
        );
        if self.grew {
            let mut places = joined(&before.places, &now.places);
            places.retain(|(_, a, b)| b > a);
            places.sort_by_key(|(_, a, b)| std::cmp::Reverse(b - a));
            rows.extend(
                places
                    .into_iter()
                    .take(PLACES)
                    .map(|((category, place), a, b)| (place.clone(), category.clone(), a, b)),
            );
        }
        rows
    }

    /// The rows of the table as JSON.
    pub fn json(&self) -> Value {
        let rows = self.rows().into_iter().map(|(what, category, before, now)| {
            json!({ "what": what, "category": category, "before_bytes": before, "now_bytes": now })
        });
        json!({
            "file": self.before.name, "grew": self.grew, "rows": rows.collect::<Vec<_>>(),
        })
    }
}

/// The keys whose values differ, in order, with both values; 0 for one that is missing.
fn joined<'k, K: Ord>(a: &'k BTreeMap<K, u64>, b: &'k BTreeMap<K, u64>) -> Vec<(&'k K, u64, u64)> {
    let keys: BTreeSet<&K> = a.keys().chain(b.keys()).collect();
    let value = |of: &BTreeMap<K, u64>, key| of.get(key).copied().unwrap_or(0);
    let rows = keys.into_iter().map(|key| (key, value(a, key), value(b, key)));
    rows.filter(|(_, a, b)| a != b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(reserved: u64, weight: u64) -> Value {
        json!({
            "device": "a6000", "outcome": "fits",
            "peak_reserved_bytes": reserved, "peak_allocated_bytes": weight,
            "processes": [{ "peak": {
                "categories": { "parameter": weight },
                "blocks": [{ "category": "parameter", "name": "fc.weight", "bytes": weight }],
            } }],
        })
    }

    fn written(form: &Value) -> anyhow::Result<Baseline> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("memory.json");
        std::fs::write(&path, form.to_string()).expect("a file");
        Baseline::read(&path)
    }

    #[test]
    fn a_peak_that_grew_beyond_the_tolerance_is_told_by_place() {
        let before = written(&form(1000, 600)).expect("a baseline");
        let against = |now: &Value, tolerance| before.against(now, tolerance).expect("peaks");
        assert!(!against(&form(1010, 610), 1000).grew);
        let growth = against(&form(1011, 611), 1000);
        assert!(growth.grew);
        let last = growth.rows().pop();
        assert_eq!(last, Some(("fc.weight".to_owned(), "parameter".to_owned(), 600, 611)));
        assert!(!against(&form(900, 500), 0).grew);
    }

    #[test]
    fn what_is_no_report_of_a_whole_run_is_refused() {
        let mut failed = form(1000, 600);
        failed["outcome"] = "out of memory".into();
        for bad in [failed, json!([1]), json!({ "device": "a6000" })] {
            assert!(written(&bad).is_err(), "{bad}");
        }
        let before = written(&form(1000, 600)).expect("a baseline");
        assert!(before.must_be_of("h100").is_err() && before.must_be_of("a6000").is_ok());
    }
}
