//! The caching allocator's settings, as `PYTORCH_CUDA_ALLOC_CONF` spells them.
//!
//! The text is read as `PyTorch` 2.11 reads it. Text that `PyTorch` would ignore or crash on is an
//! error. The settings act in [`super::pytorch`].

use std::str::FromStr;

use crate::units::Bytes;

const MIB: u64 = 1 << 20;

/// Options that change the sizes of blocks and segments.
const SIZING: [&str; 7] = [
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
];

/// Options that `PyTorch` knows and that do not change how much memory a GPU holds.
const HARMLESS: [&str; 9] = [
    "backend",
    "graph_capture_record_stream_reuse",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
];

/// The size intervals that may have their own number of divisions: 1 MiB, 2 MiB, … 32 GiB and
/// above.
const INTERVALS: usize = 16;

/// The settings of `PyTorch`'s caching allocator. The default is `PyTorch`'s.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `expandable_segments`: segments grow page by page instead of being many.
    pub expandable: bool,
    /// `garbage_collection_threshold`, in (0, 1): above this share of the allowed memory, old free
    /// segments are given back. As in `PyTorch`, it does nothing without a memory fraction.
    pub gc_threshold: Option<f64>,
    /// `large_segment_size_mb`: the segment for requests above 1 MiB and below 10 MiB.
    pub large_segment: Bytes,
    /// `max_non_split_rounding_mb`: by how much a block that may not be split may exceed the
    /// request. `None`: by the size of a large segment.
    pub max_non_split_rounding: Option<Bytes>,
    /// `max_split_size_mb`: blocks of at least this size are never split. `None`: all may be split.
    pub max_split: Option<Bytes>,
    /// `per_process_memory_fraction`: the share of the device that may be reserved, in [0, 1]. 1 is
    /// no limit.
    pub memory_fraction: Option<f64>,
    /// `roundup_power2_divisions`: into how many steps each doubling is divided, by size interval;
    /// 0 or 1: sizes are not rounded this way.
    pub divisions: [u64; INTERVALS],
}

impl Default for Config {
    fn default() -> Self {
        Self {
            expandable: false,
            gc_threshold: None,
            large_segment: Bytes(20 * MIB),
            max_non_split_rounding: None,
            max_split: None,
            memory_fraction: None,
            divisions: [0; INTERVALS],
        }
    }
}

/// A configuration that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the allocator's configuration: {problem}; known are {}, and without effect here {}", SIZING.join(", "), HARMLESS.join(", "))]
pub struct ConfigError {
    problem: String,
}

impl FromStr for Config {
    type Err = ConfigError;

    /// Reads text such as `max_split_size_mb:64,roundup_power2_divisions:[256:1,>:8]`. Empty text
    /// is the default. As in `PyTorch`, white space is ignored and a comma may end the text.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        read(text).map_err(|problem| ConfigError { problem })
    }
}

fn read(text: &str) -> Result<Config, String> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let mut config = Config::default();
    let mut seen: Vec<&str> = Vec::new();
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let Some((key, after)) = rest.split_once(':') else {
            return Err(format!("`{rest}` is not of the form option:value"));
        };
        let value;
        if let Some(list) = after.strip_prefix('[') {
            let Some((inside, tail)) = list.split_once(']') else {
                return Err(format!("the list of {key} is not closed by `]`"));
            };
            value = &after[..inside.len() + 2];
            rest = tail;
        } else {
            value = after.split(',').next().unwrap_or_default();
            rest = &after[value.len()..];
        }
        rest = match rest.strip_prefix(',') {
            Some(next) => next,
            None if rest.is_empty() => rest,
            None => {
                return Err(format!(
                    "the value of {key} must be followed by a comma, not by `{rest}`"
                ));
            }
        };
        if seen.contains(&key) {
            return Err(format!("{key} is given twice"));
        }
        seen.push(key);
        option(&mut config, key, value)?;
    }
    let large = config.large_segment;
    for (key, value) in [
        ("max_split_size_mb", config.max_split),
        ("max_non_split_rounding_mb", config.max_non_split_rounding),
    ] {
        if value.is_some_and(|v| v < large) {
            return Err(format!(
                "{key} must be at least the large segments' size, {} MiB",
                large.0 / MIB
            ));
        }
    }
    Ok(config)
}

fn option(config: &mut Config, key: &str, value: &str) -> Result<(), String> {
    match key {
        "expandable_segments" => config.expandable = truth(key, value)?,
        "garbage_collection_threshold" => {
            config.gc_threshold =
                Some(share(key, value).filter(|v| *v > 0.0 && *v < 1.0).ok_or_else(|| {
                    format!("{key} is `{value}`; it must be a number above 0 and below 1")
                })?);
        }
        "large_segment_size_mb" => {
            config.large_segment = mebibytes(key, value)?;
            if config.large_segment.0 <= 10 * MIB {
                return Err(format!("{key} is {value}; it must be above 10"));
            }
        }
        "max_non_split_rounding_mb" => config.max_non_split_rounding = Some(mebibytes(key, value)?),
        "max_split_size_mb" => config.max_split = Some(mebibytes(key, value)?),
        "per_process_memory_fraction" => {
            config.memory_fraction =
                Some(share(key, value).filter(|v| (0.0..=1.0).contains(v)).ok_or_else(|| {
                    format!("{key} is `{value}`; it must be a number from 0 to 1")
                })?);
        }
        "roundup_power2_divisions" => config.divisions = divisions(key, value)?,
        "backend" => match value {
            "native" => {}
            "cudaMallocAsync" | "hipMallocAsync" => {
                return Err(format!(
                    "{key}:{value} leaves memory to the driver's own pool, whose rules are not public and not modelled"
                ));
            }
            _ => return Err(format!("{key} is `{value}`; only native is modelled")),
        },
        "graph_capture_record_stream_reuse"
        | "pinned_use_background_threads"
        | "pinned_use_cuda_host_register"
        | "pinned_use_hip_host_register"
        | "release_lock_on_cudamalloc"
        | "release_lock_on_hipmalloc" => drop(truth(key, value)?),
        "pinned_num_register_threads" => {
            if !whole(key, value)?.is_power_of_two() || whole(key, value)? > 128 {
                return Err(format!("{key} is {value}; it must be a power of two up to 128"));
            }
        }
        "pinned_reserve_segment_size_mb" => drop(mebibytes(key, value)?),
        _ => return Err(format!("there is no option `{key}`")),
    }
    Ok(())
}

fn truth(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err(format!("{key} is `{value}`; it must be True or False")),
    }
}

fn whole(key: &str, value: &str) -> Result<u64, String> {
    let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    value
        .parse()
        .ok()
        .filter(|_| digits)
        .ok_or_else(|| format!("{key} is `{value}`; it must be a whole number"))
}

fn mebibytes(key: &str, value: &str) -> Result<Bytes, String> {
    match whole(key, value)? {
        n @ 1..=0x400_0000_0000 => Ok(Bytes(n * MIB)),
        n => Err(format!("{key} is {n}; it must be from 1 to 2^42")),
    }
}

fn share(_: &str, value: &str) -> Option<f64> {
    value.parse().ok().filter(|v: &f64| v.is_finite())
}

/// Reads one number for all intervals, or a list such as `[256:1,512:2,>:8]`: one step up to 256
/// MiB, two at 512 MiB, eight above. As in `PyTorch`, intervals between listed ones get none.
fn divisions(key: &str, value: &str) -> Result<[u64; INTERVALS], String> {
    let steps = |text: &str, least: u64| match whole(key, text)? {
        n if n >= least && (n == 0 || n.is_power_of_two()) => Ok(n),
        n => Err(format!(
            "{key}: {n} steps; it must be a power of two{}",
            if least == 0 { ", or 0 for none" } else { "" }
        )),
    };
    let Some(list) = value.strip_prefix('[').and_then(|v| v.strip_suffix(']')) else {
        return Ok([steps(value, 1)?; INTERVALS]);
    };
    let mut all = [0; INTERVALS];
    let mut last: Option<usize> = None;
    for entry in list.split(',').filter(|e| !e.is_empty()) {
        let Some((from, count)) = entry.split_once(':') else {
            return Err(format!("{key}: `{entry}` is not of the form interval:steps"));
        };
        let count = steps(count, 0)?;
        if from == ">" {
            all[last.map_or(1, |l| l + 1).min(INTERVALS)..].fill(count);
            continue;
        }
        let megabytes = whole(key, from)?;
        if !megabytes.is_power_of_two() {
            return Err(format!(
                "{key}: the interval {megabytes} must be a power of two (MiB), or `>`"
            ));
        }
        let index = (megabytes.ilog2() as usize).min(INTERVALS - 1);
        if last.is_none() {
            all[..index].fill(count);
        }
        all[index] = count;
        last = Some(index);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_read() {
        assert_eq!("".parse(), Ok(Config::default()));
        let all: Config = "max_split_size_mb:64, roundup_power2_divisions:[256:1,512:2,>:8],garbage_collection_threshold:0.8,\
            expandable_segments:True,max_non_split_rounding_mb:32,backend:native,pinned_use_background_threads:False,"
            .parse()
            .unwrap();
        assert_eq!(all.max_split, Some(Bytes(64 << 20)));
        assert_eq!(all.max_non_split_rounding, Some(Bytes(32 << 20)));
        assert_eq!(all.gc_threshold, Some(0.8));
        assert!(all.expandable);
        assert_eq!(all.divisions, [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 8, 8, 8, 8, 8, 8]);
        assert_eq!("roundup_power2_divisions:4".parse::<Config>().unwrap().divisions, [4; 16]);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_known_options() {
        for (bad, want) in [
            ("foo:1", "no option `foo`"),
            ("max_split_size_mb", "not of the form option:value"),
            ("max_split_size_mb:", "whole number"),
            ("max_split_size_mb:19", "at least"),
            ("max_split_size_mb:-1", "whole number"),
            ("max_split_size_mb:20.5", "whole number"),
            ("max_split_size_mb:99999999999999999999", "whole number"),
            ("max_split_size_mb:64,max_split_size_mb:64", "twice"),
            ("large_segment_size_mb:64,max_split_size_mb:32", "64 MiB"),
            ("large_segment_size_mb:10", "above 10"),
            ("garbage_collection_threshold:1", "below 1"),
            ("garbage_collection_threshold:nan", "below 1"),
            ("per_process_memory_fraction:1.5", "from 0 to 1"),
            ("roundup_power2_divisions:3", "power of two"),
            ("roundup_power2_divisions:0", "power of two"),
            ("roundup_power2_divisions:[3:4]", "power of two"),
            ("roundup_power2_divisions:[256:1", "`]`"),
            ("roundup_power2_divisions:[256]", "interval:steps"),
            ("roundup_power2_divisions:[256:1]x", "comma"),
            ("expandable_segments:true", "True or False"),
            ("backend:cudaMallocAsync", "not modelled"),
            (",", "not of the form option:value"),
        ] {
            let error = bad.parse::<Config>().unwrap_err().to_string();
            assert!(
                error.contains(want) && error.contains("known are expandable_segments"),
                "{bad}: {error}"
            );
        }
    }
}
