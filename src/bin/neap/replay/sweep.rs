//! Many settings of an allocator on many devices, and the least memory that serves every request.

use std::fmt;

use anyhow::bail;
use neap::report::table::{Side, Table};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::{
    LARGEST_DEVICE, Report, Setting, replay, smallest_capacity, sweep,
};
use neap::sim::sequence::Sequence;
use neap::units::Bytes;
use serde::Serialize;

use super::{Flags, Input, Target};
use crate::output::{self, Answer, note};
use crate::progress;

/// Replays every setting on every device.
pub fn all(
    flags: &Flags,
    input: Input<'_>,
    configs: &[(String, Config)],
    targets: &[Target],
    as_json: bool,
) -> anyhow::Result<Answer> {
    let sequence = Sequence::rest(&mut input.reader()?)?;
    let pairs: Vec<(&str, &Config, &Target)> = targets
        .iter()
        .flat_map(|t| configs.iter().map(move |(text, config)| (text.as_str(), config, t)))
        .collect();
    let settings: Vec<Setting> = pairs
        .iter()
        .map(|(_, config, target)| Setting {
            config: (*config).clone(),
            capacity: target.capacity,
            memory_fraction: flags.memory_fraction,
        })
        .collect();
    let working = progress::working(&format!("replaying {} settings", settings.len()));
    let reports = sweep(&sequence.requests, &settings);
    let least: Vec<Option<Bytes>> = if flags.smallest_device {
        let least = |config| smallest_capacity(&sequence.requests, config, flags.memory_fraction);
        configs.iter().map(|(_, config)| least(config).map(|l| l.capacity)).collect()
    } else {
        Vec::new()
    };
    working.finish_and_clear();
    let rows = pairs.iter().zip(&reports).enumerate().map(|(i, (&(conf, _, target), report))| {
        SettingReport::new(conf, target, report, least.get(i % configs.len()).copied())
    });
    let fits = reports.iter().any(|r| r.stats.ooms == 0);
    let assumes = super::assumed(flags);
    output::report(&SweepReport { fits, assumes, settings: rows.collect() }, as_json)?;
    if !fits {
        note("no setting fits");
    }
    Ok(Answer::yes_if(fits))
}

#[derive(Serialize)]
struct SweepReport {
    fits: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    assumes: Option<&'static str>,
    settings: Vec<SettingReport>,
}

/// One setting on one device.
#[derive(Serialize)]
struct SettingReport {
    alloc_conf: String,
    device: String,
    device_bytes: Bytes,
    fits: bool,
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
    fragmentation_bytes: Bytes,
    segments: u64,
    ooms: u64,
    retries: u64,
    /// With --smallest-device; the inner `None` means that no device serves every request.
    #[serde(skip_serializing_if = "Option::is_none")]
    smallest_device_bytes: Option<Option<Bytes>>,
}

impl SettingReport {
    fn new(conf: &str, target: &Target, report: &Report, least: Option<Option<Bytes>>) -> Self {
        Self {
            alloc_conf: conf.to_owned(),
            device: target.name.clone(),
            device_bytes: target.capacity,
            fits: report.stats.ooms == 0,
            peak_reserved_bytes: report.at_peak.reserved,
            peak_allocated_bytes: report.stats.peak_allocated,
            fragmentation_bytes: report.at_peak.fragmentation(),
            segments: report.at_peak.segments,
            ooms: report.stats.ooms,
            retries: report.stats.retries,
            smallest_device_bytes: least,
        }
    }
}

impl fmt::Display for SweepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut columns = vec![
            ("setting", Side::Left),
            ("device", Side::Left),
            ("fits", Side::Left),
            ("reserved", Side::Right),
            ("allocated", Side::Right),
            ("not in use", Side::Right),
            ("segments", Side::Right),
            ("OOMs", Side::Right),
            ("retries", Side::Right),
        ];
        if self.settings.iter().any(|s| s.smallest_device_bytes.is_some()) {
            columns.push(("smallest device", Side::Right));
        }
        let mut table = Table::new(&columns);
        for s in &self.settings {
            let conf = if s.alloc_conf.is_empty() { "default" } else { &s.alloc_conf };
            let mut row = vec![
                conf.to_owned(),
                s.device.clone(),
                if s.fits { "yes" } else { "no" }.to_owned(),
                s.peak_reserved_bytes.to_string(),
                s.peak_allocated_bytes.to_string(),
                s.fragmentation_bytes.to_string(),
                s.segments.to_string(),
                s.ooms.to_string(),
                s.retries.to_string(),
            ];
            let least = |l: Option<Bytes>| l.map_or_else(|| "none".to_owned(), |l| l.to_string());
            row.extend(s.smallest_device_bytes.map(least));
            table.row(row);
        }
        write!(f, "{table}")
    }
}

/// Finds the smallest device memory at which no request fails.
pub fn smallest(
    flags: &Flags,
    input: Input<'_>,
    config: &Config,
    as_json: bool,
) -> anyhow::Result<Answer> {
    if !flags.device.is_empty()
        || !flags.device_bytes.is_empty()
        || flags.curve.is_some()
        || flags.plot.is_some()
    {
        bail!(
            "--smallest-device looks for the device itself; leave --device, --device-bytes, \
             --curve and --plot out"
        );
    }
    let sequence = Sequence::rest(&mut input.reader()?)?;
    let working = progress::working("looking for the smallest device");
    let least = smallest_capacity(&sequence.requests, config, flags.memory_fraction);
    working.finish_and_clear();
    let Some(least) = least else {
        note(&format!("no device up to {LARGEST_DEVICE} serves every request"));
        return Ok(Answer::No);
    };
    let report = replay(&sequence.requests, config, least.capacity, flags.memory_fraction);
    let report = SmallestReport {
        file: flags.events.display().to_string(),
        smallest_device_bytes: least.capacity,
        proven: least.proven,
        peak_reserved_bytes: report.at_peak.reserved,
        peak_allocated_bytes: report.stats.peak_allocated,
        retries: report.stats.retries,
    };
    output::report(&report, as_json)?;
    Ok(Answer::Yes)
}

#[derive(Serialize)]
struct SmallestReport {
    file: String,
    smallest_device_bytes: Bytes,
    /// Whether every smaller device is known to fail.
    proven: bool,
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
    retries: u64,
}

impl fmt::Display for SmallestReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sure = match self.proven {
            true => "every smaller one fails",
            false => "found by bisection: a smaller one may do",
        };
        write!(
            f,
            "smallest device  {} ({} bytes), for the job alone; {sure}\nretries on it    {}",
            self.smallest_device_bytes, self.smallest_device_bytes.0, self.retries
        )
    }
}
