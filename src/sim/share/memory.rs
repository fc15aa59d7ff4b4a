//! The memory needs of workloads by name: a table of persistent and ephemeral bytes.
//!
//! The columns are those of the table published with Salus: `Network`, `Persistent Mem (MB)` and
//! `Peak` (the ephemeral part), in units of 2^20 bytes. Or they are `workload`, `persistent_bytes`
//! and `ephemeral_bytes`. Other columns are ignored.

use std::collections::BTreeMap;
use std::path::Path;

use super::rows::{self, RowsError, decimal};
use crate::units::{Bytes, saturated};

/// Persistent and ephemeral bytes of a workload.
pub type Need = (Bytes, Bytes);

/// The needs by workload.
pub type Memory = BTreeMap<String, Need>;

/// The largest table that is read, in bytes.
const LARGEST: u64 = 64 << 20;

/// Reads a table.
///
/// # Errors
/// An error that names file, line and remedy.
pub fn read(path: &Path) -> Result<Memory, RowsError> {
    let mut all = Memory::new();
    rows::open(path, LARGEST, columns, |&(places, unit), record, _| {
        let [name, persistent, ephemeral] = places.map(|at| record.get(at).unwrap_or(""));
        let size = |text: &str| {
            let bytes = decimal(text).map(|b| (b * unit).div_ceil(1_000_000_000));
            // At most 2^50.
            let bytes = bytes.filter(|b| *b <= 1 << 50).map(|b| Bytes(saturated(b)));
            let units = if unit == 1 { "bytes" } else { "MiB" };
            bytes.ok_or_else(|| format!("`{text}` is not a size; write a number of {units}"))
        };
        if name.is_empty() {
            return Err("names no workload; give it a name or remove the row".into());
        }
        match all.insert(name.to_owned(), (size(persistent)?, size(ephemeral)?)) {
            Some(_) => Err(format!("`{name}` stands in the table twice; keep one")),
            None => Ok(()),
        }
    })?;
    Ok(all)
}

/// The places of a workload's name and of its two needs, and the needs' unit.
fn columns(headers: &csv::StringRecord) -> Result<([usize; 3], u128), String> {
    let at = |names: [&str; 3]| {
        let [name, persistent, ephemeral] = names.map(|n| headers.iter().position(|h| h == n));
        Some([name?, persistent?, ephemeral?])
    };
    let bytes = at(["workload", "persistent_bytes", "ephemeral_bytes"]).map(|places| (places, 1));
    let published = || Some((at(["Network", "Persistent Mem (MB)", "Peak"])?, 1 << 20));
    bytes.or_else(published).ok_or_else(|| {
        "needs the columns workload, persistent_bytes, ephemeral_bytes; or Network, Persistent Mem \
         (MB), Peak"
            .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_read_and_bad_ones_name_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.csv");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            super::read(&path).map_err(|e| e.to_string())
        };
        for (text, name, need) in [
            (
                "Network,Persistent Mem (MB),Peak Mem (MB),Average,Peak\na,1.5,3,2,1.0000000001\n",
                "a",
                (3 << 19, (1 << 20) + 1),
            ),
            ("workload,persistent_bytes,ephemeral_bytes\nb,10,20\n", "b", (10, 20)),
        ] {
            assert_eq!(read(text).unwrap()[name], (Bytes(need.0), Bytes(need.1)));
        }
        for (text, want) in [
            ("a,b\n1,2\n", "columns"),
            ("workload,persistent_bytes,ephemeral_bytes\nb,-1,20\n", "line 2"),
            ("workload,persistent_bytes,ephemeral_bytes\nb,1,20\nb,1,2\n", "twice"),
            ("workload,persistent_bytes,ephemeral_bytes\nb,1\n", "line 2"),
            ("workload,persistent_bytes,ephemeral_bytes\n,1,1\n", "names no workload"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(want) && error.contains("m.csv"), "{error}");
        }
    }
}
