//! Checks that a device's memory is safe, from plain figures. This is an independent proof: it
//! shares no code with lanes, layout or engine.

/// A device's memory at an iteration boundary.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// Bytes of the device.
    pub capacity: u64,
    /// The resident jobs.
    pub residents: Vec<Resident>,
    /// Each lane: its number, its bytes, and its address where addresses are checked.
    pub lanes: Vec<(u32, u64, Option<u64>)>,
}

/// A resident job.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    /// Persistent bytes.
    pub persistent: u64,
    /// Their address, where addresses are checked.
    pub at: Option<u64>,
    /// Bytes that an iteration needs in its lane.
    pub ephemeral: u64,
    /// Its lane, if it has one now.
    pub lane: Option<u32>,
}

/// Checks that the picture is safe.
///
/// # Errors
/// The first reason found why it is not.
pub fn check(picture: &Picture) -> Result<(), String> {
    let mut total: u128 = 0;
    let mut ranges: Vec<(u64, u128, String)> = Vec::new();
    let mut holds = |bytes: u64, at: Option<u64>, who: String| {
        total += u128::from(bytes);
        ranges.extend(at.map(|at| (at, u128::from(at) + u128::from(bytes), who)));
    };
    for (number, resident) in picture.residents.iter().enumerate() {
        let &Resident { persistent, at, ephemeral, lane } = resident;
        holds(persistent, at, format!("resident {number}"));
        let Some(lane) = lane else { continue };
        let mut found = picture.lanes.iter().filter(|l| l.0 == lane);
        let Some(&(_, size, _)) = found.next() else {
            return Err(format!("resident {number} is in lane {lane}, which does not exist"));
        };
        if found.next().is_some() {
            return Err(format!("lane {lane} is listed twice"));
        }
        if ephemeral > size {
            return Err(format!(
                "resident {number} needs {ephemeral} bytes in lane {lane}, which has {size}"
            ));
        }
    }
    picture.lanes.iter().for_each(|(lane, size, at)| holds(*size, *at, format!("lane {lane}")));
    if total > u128::from(picture.capacity) {
        return Err(format!("{total} bytes are promised, but the device has {}", picture.capacity));
    }
    ranges.retain(|(from, to, _)| u128::from(*from) < *to);
    ranges.sort();
    if let Some((_, to, who)) = ranges.iter().find(|r| r.1 > u128::from(picture.capacity)) {
        return Err(format!("{who} ends at {to}, behind the device's end at {}", picture.capacity));
    }
    match ranges.windows(2).find(|two| two[0].1 > u128::from(two[1].0)) {
        Some(two) => Err(format!("{} and {} overlap at {}", two[0].2, two[1].2, two[1].0)),
        None => Ok(()),
    }
}
