//! The devices as a whole, where several processes of a run used one: when each was fullest, and
//! who had what then.

use std::collections::{BTreeMap, BTreeSet};

use neap::report::table::{Side, Table};
use neap::units::{Bytes, saturated};
use serde_json::{Value, json};

use super::found::{DeviceLog, Had};

/// The processes that are printed.
const MOST: usize = 12;

/// A device at its fullest.
#[derive(Debug, PartialEq, Eq)]
pub struct Fullest {
    device: u32,
    bytes: Bytes,
    /// Since the first process took memory.
    at_ns: u64,
    /// The processes that had something then: number, name and bytes, most first.
    holders: Vec<(u32, String, Bytes)>,
}

/// The devices that several processes used.
pub fn fullest(logs: &BTreeMap<u32, DeviceLog>) -> Vec<Fullest> {
    let devices: BTreeSet<u32> =
        logs.values().flat_map(|log| log.moments.iter().map(|had| had.device)).collect();
    let users = |device: &u32| {
        let uses = |log: &&DeviceLog| log.moments.iter().any(|had| had.device == *device);
        logs.values().filter(uses).count()
    };
    devices.into_iter().filter(|d| users(d) > 1).filter_map(|d| of_device(logs, d)).collect()
}

fn of_device(logs: &BTreeMap<u32, DeviceLog>, device: u32) -> Option<Fullest> {
    // Each change: when, whose, and what that process has then.
    let had = |(&pid, log): (&u32, &DeviceLog)| {
        let on = log.moments.iter().filter(|had| had.device == device);
        let own = on.map(|&Had { at_ns, bytes, .. }| (at_ns, pid, bytes)).collect::<Vec<_>>();
        let gone = log.gone.iter().map(|&(pid, at_ns)| (at_ns, pid, 0)).collect::<Vec<_>>();
        own.into_iter().chain(gone)
    };
    let mut changes: Vec<(u64, u32, u64)> = logs.iter().flat_map(had).collect();
    // Stable: a process's own changes stay in order.
    changes.sort_by_key(|change| change.0);
    let first = changes.first()?.0;
    let (mut now, mut sum, mut best) = (BTreeMap::new(), 0u128, (0u128, 0, BTreeMap::new()));
    for (at, pid, bytes) in changes {
        let before = now.insert(pid, bytes).unwrap_or(0);
        sum = sum + u128::from(bytes) - u128::from(before);
        if sum > best.0 {
            best = (sum, at, now.clone());
        }
    }
    let (bytes, at, held) = best;
    let name = |pid: &u32| logs.get(pid).map(|log| log.name.clone()).unwrap_or_default();
    let some = held.into_iter().filter(|one| one.1 > 0);
    let mut holders: Vec<_> = some.map(|(pid, b)| (pid, name(&pid), Bytes(b))).collect();
    holders.sort_by_key(|holder| (std::cmp::Reverse(holder.2), holder.0));
    let bytes = Bytes(saturated(bytes));
    Some(Fullest { device, bytes, at_ns: at - first, holders })
}

/// The devices for programs.
pub fn form(all: &[Fullest]) -> Value {
    let one = |of: &Fullest| {
        let holder = |(pid, name, bytes): &(u32, String, Bytes)| json!({ "pid": pid, "name": name, "bytes": bytes });
        json!({
            "device": of.device,
            "fullest_bytes": of.bytes,
            "at_s": of.at_ns as f64 / 1e9,
            "holders": of.holders.iter().map(holder).collect::<Value>(),
        })
    };
    all.iter().map(one).collect()
}

/// A device as a table.
pub fn table(of: &Fullest, device: &str) -> String {
    let Fullest { bytes, at_ns, holders, .. } = of;
    let mut table = Table::new(&[
        ("process", Side::Right),
        ("name", Side::Left),
        ("has", Side::Right),
        ("bytes", Side::Right),
    ]);
    for (pid, name, bytes) in holders.iter().take(MOST) {
        table.row([pid.to_string(), name.clone(), bytes.to_string(), bytes.0.to_string()]);
    }
    format!(
        "\n{device} {} as a whole is fullest {:.1} s after the first process took memory, with \
         {bytes} ({} bytes) of {} processes:\n{table}",
        of.device,
        *at_ns as f64 / 1e9,
        bytes.0,
        holders.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(name: &str, moments: &[(u64, u64)], gone: &[(u32, u64)]) -> DeviceLog {
        let moments =
            moments.iter().map(|&(at_ns, bytes)| Had { at_ns, device: 0, bytes }).collect();
        DeviceLog { name: name.to_owned(), moments, gone: gone.to_vec(), ..DeviceLog::default() }
    }

    #[test]
    fn the_fullest_instant_counts_all_that_live() {
        let logs = BTreeMap::from([
            (7, log("a.py", &[(10, 5), (20, 9), (50, 2)], &[])),
            // The first one is found dead before the second grows.
            (8, log("b.py", &[(30, 4), (70, 10)], &[(7, 65)])),
        ]);
        let all = fullest(&logs);
        let holders = vec![(7, "a.py".to_owned(), Bytes(9)), (8, "b.py".to_owned(), Bytes(4))];
        assert_eq!(all, [Fullest { device: 0, bytes: Bytes(13), at_ns: 20, holders }]);
        assert!(table(&all[0], "h100").contains("of 2 processes"), "{}", table(&all[0], "h100"));
        assert_eq!(form(&all)[0]["holders"][1]["bytes"], 4);
    }

    #[test]
    fn a_device_of_one_process_is_that_process() {
        assert_eq!(fullest(&BTreeMap::from([(7, log("a.py", &[(1, 5)], &[]))])), []);
    }
}
