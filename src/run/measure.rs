//! Measures how fast a device is: its link for several sizes, in both directions and under load,
//! its memory, its matrix products, its overheads.
//!
//! On the host device the link is a copy through memory, as fast as it goes, and others are put to
//! work for the figures under load; on a GPU matrix products run meanwhile. Every rate is
//! that of the fastest repeat or round, because other programs may slow the machine down.

use std::collections::BTreeMap;

use super::backend::host::{self, link::LinkRate};
use super::backend::{Failure, Item, Stream, Work};
use super::profile::{again, alike, first, middle, once};
use super::{RunError, Settings, Target, open, sweep};
use crate::device::{Link, Profile, Rates, roofline};
use crate::job::Graph;
use crate::units::{Bytes, Nanos};

/// How large what is measured is.
struct Sizes {
    /// What is copied, in KiB.
    copies_kib: &'static [u64],
    /// Matrices' extents.
    products: &'static [u64],
    /// Each tensor of an addition, in MiB: beyond the device's caches.
    addition_mib: u64,
}

/// Enough for two cores, and for a quick try of a GPU.
const SMALL: Sizes = Sizes {
    copies_kib: &[4, 64, 256, 1024, 8 * 1024, 32 * 1024],
    products: &[128, 256, 512, 1024],
    addition_mib: 16,
};

/// Enough to fill a GPU of 132 multiprocessors and 50 MiB of cache.
const LARGE: Sizes = Sizes {
    copies_kib: &[4, 64, 256, 1024, 8 << 10, 32 << 10, 128 << 10, 512 << 10],
    products: &[1024, 2048, 4096, 8192],
    addition_mib: 1024,
};

/// Of the product that runs while a GPU copies.
const MEANWHILE: u64 = 4096;

/// The load in percent for the figures under load.
const LOAD: u32 = 100;

/// How many times each figure is measured, at different times.
const ROUNDS: usize = 3;

/// Rates of copies of one size in bytes per second, overhead included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkRates {
    /// Bytes of one copy.
    pub bytes: Bytes,
    /// Whether other threads kept the device busy.
    pub loaded: bool,
    /// To the device, alone.
    pub h2d: u64,
    /// From the device, alone.
    pub d2h: u64,
    /// To the device while the other direction copies too.
    pub h2d_both: u64,
    /// From the device while the other direction copies too.
    pub d2h_both: u64,
}

/// The results of a measurement.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The profile, for `--device`.
    pub profile: Profile,
    /// The link's rates by size, idle and under load.
    pub link: Vec<LinkRates>,
    /// Matrix products: the extent, and floating-point operations per second.
    pub products: Vec<(u64, u64)>,
}

/// Measures a device. Figures that can't be measured, such as memory sizes, are taken from `base`.
///
/// # Errors
/// When the device fails.
pub fn measure(
    target: &Target,
    base: &Profile,
    name: &str,
    quick: bool,
) -> Result<Measurement, RunError> {
    let small = quick || *target == Target::Host;
    let sizes = if small { SMALL } else { LARGE };
    let mut link = Vec::new();
    // A product on a test driver takes minutes.
    let loads = if quick && *target != Target::Host { &[false][..] } else { &[false, true] };
    for loaded in loads {
        for kib in sizes.copies_kib {
            link.push(
                rates(target, Bytes(*kib << 10), *loaded)
                    .map_err(|f| RunError::Device(target.name(), f.to_string()))?,
            );
        }
    }
    let largest =
        link.iter().filter(|l| !l.loaded).max_by_key(|l| l.bytes).copied().unwrap_or_default();
    let smallest =
        link.iter().filter(|l| !l.loaded).min_by_key(|l| l.bytes).copied().unwrap_or_default();
    let time = |bytes: Bytes, rate: u64| {
        u64::try_from(u128::from(bytes.0) * 1_000_000_000 / u128::from(rate.max(1)))
            .unwrap_or(u64::MAX)
    };
    let overhead =
        time(smallest.bytes, smallest.h2d).saturating_sub(time(smallest.bytes, largest.h2d));

    let mut products = Vec::new();
    let most = if quick { 2 } else { sizes.products.len() };
    for &extent in &sizes.products[..most] {
        products
            .push((extent, work_rate(target, &[sweep::product(extent)], base, roofline::flops)?));
    }
    let f32 = products.iter().map(|p| p.1).max().unwrap_or(1).max(1);
    let convolutions: Vec<Graph> = sweep::samples("conv2d", 40, 0)
        .unwrap_or_default()
        .into_iter()
        .filter(is_substantial)
        .take(4)
        .collect();
    let reached = work_rate(target, &convolutions, base, roofline::flops)?;
    let addition = if quick { 1 } else { sizes.addition_mib };
    let memory_bandwidth = work_rate(target, &[sweep::large_add(addition)], base, roofline::bytes)?;
    let launch = launch(target, base)?;
    let efficiency_percent =
        u32::try_from(u128::from(reached) * 100 / u128::from(f32)).unwrap_or(100).clamp(1, 100);

    let measured = |rate: u64| rate.clamp(1, 1 << 60);
    let profile = Profile {
        name: name.to_owned(),
        source: format!(
            "Measured by `neap device measure` on the {} device: copies of {} between its two memories; matrix products up to {}, f16 and f64 taken as f32 and \
             half of it; an addition of {} MiB in all; efficiency is what {} convolutions reach of \
             the products' rate. \
             Memory, reserve and pinned memory are those of {}.",
            target.name(),
            largest.bytes,
            products.iter().map(|p| p.0).max().unwrap_or(0),
            3 * addition,
            convolutions.len(),
            base.name
        ),
        flops: Rates { f32: measured(f32), f16: measured(f32), f64: measured(f32 / 2) },
        memory_bandwidth: measured(memory_bandwidth),
        efficiency_percent,
        link: Link {
            h2d: measured(largest.h2d),
            d2h: measured(largest.d2h),
            h2d_contended: measured(largest.h2d_both.min(largest.h2d)),
            d2h_contended: measured(largest.d2h_both.min(largest.d2h)),
            overhead_ns: overhead.min(1_000_000_000),
        },
        launch_overhead_ns: launch.0.min(1_000_000_000),
        ..base.clone()
    };
    Ok(Measurement { profile, link, products })
}

/// Whether a graph's operator is large enough to measure arithmetic, and small enough to run
/// quickly.
fn is_substantial(graph: &Graph) -> bool {
    graph
        .operators
        .first()
        .is_some_and(|o| (100_000_000..400_000_000).contains(&roofline::flops(o)))
}

/// The flops of all graphs' operators per second, each at its fastest.
fn work_rate(
    target: &Target,
    graphs: &[Graph],
    base: &Profile,
    work: fn(&crate::job::Operator) -> u128,
) -> Result<u64, RunError> {
    let settings = Settings { target: target.clone(), ..Settings::default() };
    let (mut total, mut time) = (0u128, 0u128);
    for graph in graphs {
        let mut least = u64::MAX;
        for _ in 0..ROUNDS {
            for (start, end) in again(graph, base, &settings, 6)?.0 {
                least = least.min((end - start).0);
            }
        }
        total += graph.operators.first().map_or(0, work);
        time += u128::from(least);
    }
    Ok(u64::try_from(total * 1_000_000_000 / time.max(1)).unwrap_or(u64::MAX))
}

/// The time of a step that does next to nothing: the median distance from one start to the next.
fn launch(target: &Target, base: &Profile) -> Result<Nanos, RunError> {
    let settings = Settings { target: target.clone(), ..Settings::default() };
    let (times, _) = again(&sweep::smallest(), base, &settings, 1000)?;
    let distances: Vec<Nanos> = times.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    Ok(middle(&distances))
}

fn rates(target: &Target, bytes: Bytes, loaded: bool) -> Result<LinkRates, Failure> {
    let rate = |streams: &[Stream]| -> Result<[u64; 3], Failure> {
        let mut best = [0; 3];
        for _ in 0..ROUNDS {
            let now = copies(target, bytes, loaded, streams)?;
            best.iter_mut().zip(now).for_each(|(best, now)| *best = now.max(*best));
        }
        Ok(best)
    };
    let (up, down) = (Stream::H2d.index(), Stream::D2h.index());
    let (h2d, d2h, both) =
        (rate(&[Stream::H2d])?, rate(&[Stream::D2h])?, rate(&[Stream::H2d, Stream::D2h])?);
    Ok(LinkRates {
        bytes,
        loaded,
        h2d: h2d[up],
        d2h: d2h[down],
        h2d_both: both[up],
        d2h_both: both[down],
    })
}

/// The fastest copy's rate on one stream. On two streams that copy at the same time the median,
/// because the last copies run alone.
fn copies(
    target: &Target,
    bytes: Bytes,
    loaded: bool,
    streams: &[Stream],
) -> Result<[u64; 3], Failure> {
    let repeats = (64 << 20) / bytes.0.max(1);
    let repeats = repeats.clamp(8, 200);
    let mut items = Vec::new();
    for _ in 0..repeats {
        for (lane, &stream) in streams.iter().enumerate() {
            let at = Bytes(bytes.in_blocks().0 * lane as u64);
            let work = Work::Copy { device: at, host: at, bytes };
            items.push(Item {
                stream,
                waits: Vec::new(),
                fetches: Vec::new(),
                due: None,
                work,
                top: Bytes::ZERO,
            });
        }
    }
    let memory = Bytes(bytes.in_blocks().0 * streams.len() as u64);
    let mut arena = memory;
    let mut graph = Graph {
        name: String::new(),
        tensors: Vec::new(),
        operators: Vec::new(),
        optimizer: None,
        loss: None,
        recorded_peak: None,
        origin: None,
    };
    let copied = items.len();
    if loaded && *target != Target::Host {
        graph = sweep::product(MEANWHILE);
        let (product, _) = first(&graph, memory);
        arena = product.top;
        // Some milliseconds each: as long as the copies, at 100 GB/s and more.
        let enough = (repeats * bytes.0 / (100 << 20)).clamp(4, 200) as usize;
        items.extend(std::iter::repeat_n(product, enough));
    }
    let mut script = alike(items, arena, memory);
    // Products first: they are there when the first copy goes.
    script.order.rotate_left(copied);
    let options = host::Options {
        link: LinkRate::Unlimited,
        throttle_per_mille: 1000,
        throttle_later: Vec::new(),
        load_percent: if loaded && *target == Target::Host { LOAD } else { 0 },
        poison: false,
        jitter: Nanos::ZERO,
    };
    let (measured, _) = open(
        (target, None),
        &graph,
        (&script, &BTreeMap::new()),
        host::kernels::find,
        &[],
        &options,
        |device| {
            // Otherwise the first access to each page would be measured.
            let ones = vec![1; usize::try_from(memory.0).unwrap_or(0)];
            device.write(super::backend::Memory::Device, Bytes::ZERO, &ones)?;
            device.write(super::backend::Memory::Host, Bytes::ZERO, &ones)?;
            once(device, &script)
        },
    )?;
    let measured = measured?;
    let mut rates = [0; 3];
    for &stream in streams {
        let times: Vec<Nanos> = script.streams[stream.index()]
            .iter()
            .filter(|&&i| i < copied)
            .map(|&i| measured.items[i].1 - measured.items[i].0)
            .collect();
        let time = if streams.len() == 1 {
            times.iter().copied().min().unwrap_or_default()
        } else {
            middle(&times)
        };
        rates[stream.index()] =
            u64::try_from(u128::from(bytes.0) * 1_000_000_000 / u128::from(time.0.max(1)))
                .unwrap_or(u64::MAX);
    }
    Ok(rates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_timed_each_way_and_together() {
        let one = rates(&Target::Host, Bytes(64 << 10), false).unwrap();
        assert!(
            [one.h2d, one.d2h, one.h2d_both, one.d2h_both].iter().all(|&r| r > 1_000_000),
            "{one:?}"
        );
        let base = crate::device::builtin::find("host").unwrap();
        assert!(launch(&Target::Host, &base).unwrap() > Nanos::ZERO);
    }
}
