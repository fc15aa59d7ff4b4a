//! The card that a script runs on, as PyTorch described it.

use std::env;
use std::path::Path;

use neap::device::{builtin, present};
use neap::units::Bytes;
use serde::Deserialize;

use super::linux::LARGEST_REPORT;
use crate::dry::launch::Memory;

/// What the dry device must have in common with the card for the script to run the same kernels.
/// What a process could not find out is left open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Card {
    name: Option<String>,
    /// The compute capability, major × 10 + minor.
    capability: Option<u32>,
    multiprocessors: Option<u32>,
    /// What the card says it has; scripts choose sizes by it.
    memory_bytes: Option<u64>,
    /// How many cards the process sees.
    devices: Option<u32>,
    /// What the process had, and what it could still have had.
    available_bytes: Option<u64>,
}

impl Card {
    /// What a process of the script wrote.
    pub fn read(path: &Path) -> Self {
        let text = neap::files::read_regular(path, LARGEST_REPORT).unwrap_or_default();
        let mut card: Self = serde_json::from_str(&text).unwrap_or_default();
        // What no card has is left to the profile: the dry device would take it as it is.
        card.name = card.name.filter(|name| name.len() <= 256 && !name.contains('\0'));
        card.capability = card.capability.filter(|capability| *capability < 1000);
        card.multiprocessors = card.multiprocessors.filter(|count| *count < 1 << 16);
        card.devices = card.devices.filter(|count| *count <= 64);
        card.memory_bytes = card.memory_bytes.filter(|bytes| *bytes <= Memory::UNLIMITED.total.0);
        card.available_bytes =
            card.available_bytes.filter(|bytes| *bytes <= Memory::UNLIMITED.total.0);
        card
    }

    /// The first GPU of this machine, or the dry device where this runs inside `neap dry`.
    ///
    /// # Errors
    /// Why there is none, in a sentence.
    pub fn here() -> Result<Self, String> {
        let number = |name: &str| env::var(name).ok()?.parse::<u64>().ok();
        let narrow = |n: u64| u32::try_from(n).ok();
        if let Ok(name) = env::var("NEAP_DRY_NAME") {
            return Ok(Self {
                name: Some(name),
                capability: number("NEAP_DRY_CAPABILITY").and_then(narrow),
                multiprocessors: number("NEAP_DRY_MULTIPROCESSORS").and_then(narrow),
                memory_bytes: number("NEAP_DRY_TOTAL_BYTES"),
                devices: number("NEAP_DRY_DEVICES").and_then(narrow),
                available_bytes: number("NEAP_DRY_CAPACITY_BYTES"),
            });
        }
        let all = present::cuda_devices()?;
        let first = all.first().ok_or("the NVIDIA driver finds no device")?;
        Ok(Self {
            name: Some(first.name.clone()),
            capability: Some(first.capability),
            multiprocessors: Some(first.multiprocessors),
            memory_bytes: Some(first.memory_bytes.0),
            devices: u32::try_from(all.len()).ok(),
            available_bytes: None,
        })
    }

    /// Whether the process found a card.
    pub fn is_known(&self) -> bool {
        self.name.is_some()
    }

    /// The built-in device that it is.
    pub fn profile(&self) -> Option<&'static str> {
        builtin::like(self.name.as_deref()?)
    }

    /// The bytes of the card that the script may take, if the process found out.
    pub fn available(&self) -> Option<Bytes> {
        self.available_bytes.filter(|&bytes| bytes > 0).map(Bytes)
    }

    /// The settings that make the dry device this card.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let number = |n: u64| (n > 0).then(|| n.to_string());
        let name = self.name.as_deref().filter(|name| !name.is_empty());
        let settings = [
            ("NEAP_DRY_CAPABILITY", self.capability.and_then(|n| number(n.into()))),
            ("NEAP_DRY_MULTIPROCESSORS", self.multiprocessors.and_then(|n| number(n.into()))),
            ("NEAP_DRY_TOTAL_BYTES", self.memory_bytes.and_then(number)),
            ("NEAP_DRY_DEVICES", self.devices.and_then(|n| number(n.into()))),
            ("NEAP_DRY_NAME", name.map(str::to_owned)),
        ];
        settings.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_card_that_no_profile_matches_is_taken_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("card-7");
        let text = r#"{"name": "NVIDIA Q", "capability": 121, "multiprocessors": 48,
                       "memory_bytes": 137438953472, "devices": 2}"#;
        fs::write(&path, text).expect("a file");
        let found = Card::read(&path).environment();
        let wanted = [
            ("NEAP_DRY_CAPABILITY", "121"),
            ("NEAP_DRY_MULTIPROCESSORS", "48"),
            ("NEAP_DRY_TOTAL_BYTES", "137438953472"),
            ("NEAP_DRY_DEVICES", "2"),
            ("NEAP_DRY_NAME", "NVIDIA Q"),
        ];
        assert_eq!(found, wanted.map(|(name, value)| (name, value.to_owned())));
    }

    #[test]
    fn what_no_card_has_is_left_to_the_profile() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("card-7");
        for text in [
            r#"{"devices": 4294967295, "multiprocessors": 4294967295, "capability": 4294967295}"#,
            r#"{"memory_bytes": 18446744073709551615, "available_bytes": 18446744073709551615}"#,
            r#"{"name": "a\u0000b"}"#,
        ] {
            fs::write(&path, text).expect("a file");
            assert_eq!(Card::read(&path), Card::default(), "{text}");
        }
    }

    #[test]
    fn what_a_process_could_not_write_is_left_to_the_profile() {
        let folder = tempfile::tempdir().expect("a folder");
        for text in ["", "{", "{\"capability\": 86}"] {
            let path = folder.path().join("card-7");
            fs::write(&path, text).expect("a file");
            let known = usize::from(text.ends_with('}') && text.len() > 2);
            assert_eq!(Card::read(&path).environment().len(), known, "{text}");
        }
        assert_eq!(Card::read(&folder.path().join("none")), Card::default());
    }
}
