//! Measures how fast a device is: its link for several sizes, in both directions and under load,
//! its memory, its matrix products, its overheads.
//!
//! On the host device the link is a copy through memory, as fast as it goes, and others are put to
//! work for the figures under load; on a GPU matrix products run meanwhile. Every rate is
//! that of the fastest repeat or round, because other programs may slow the machine down.

use std::collections::BTreeMap;

use super::backend::host::{self, link::LinkRate};
use super::backend::{Failure, Item, Measured, Script, Stream, Work};
use super::profile::{again, alike, first, middle, once};
use super::{RunError, Settings, Spare, Target, open, sweep};
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
    /// Batch, channels and side of 3 x 3 convolutions.
    convolutions: &'static [(u64, u64, u64)],
    /// How many times each figure is measured, at different times.
    rounds: usize,
}

/// For a try of the command: a test driver computes one number at a time.
const TINY: Sizes = Sizes {
    copies_kib: &[4, 256, 8 * 1024],
    products: &[64, 128],
    addition_mib: 1,
    convolutions: &[(1, 16, 16)],
    rounds: 1,
};

/// Enough for two cores.
const SMALL: Sizes = Sizes {
    copies_kib: &[4, 64, 256, 1024, 8 * 1024, 32 * 1024],
    products: &[128, 256, 512, 1024],
    addition_mib: 16,
    convolutions: &[(2, 64, 56), (4, 128, 14), (8, 256, 7)],
    rounds: 3,
};

/// Enough to fill a GPU of 132 multiprocessors and 50 MiB of cache.
const LARGE: Sizes = Sizes {
    copies_kib: &[4, 64, 256, 1024, 8 << 10, 32 << 10, 128 << 10, 512 << 10],
    products: &[1024, 2048, 4096, 8192],
    addition_mib: 1024,
    // Of ResNet-50 with 64 images.
    convolutions: &[(64, 64, 56), (64, 128, 28), (64, 256, 14)],
    rounds: 3,
};

/// Of the product that runs while a GPU copies.
const MEANWHILE: u64 = 4096;

/// The load in percent for the figures under load.
const LOAD: u32 = 100;

/// What the device does beside copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Beside {
    /// Nothing.
    #[default]
    Nothing,
    /// On a GPU matrix products; on the host its other threads.
    Products,
    /// Additions, which wait for memory: on a GPU only.
    Additions,
}

/// Rates of copies of one size in bytes per second, overhead included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkRates {
    /// Bytes of one copy.
    pub bytes: Bytes,
    /// What else the device did.
    pub beside: Beside,
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
    let (sizes, loads) = match (quick, *target == Target::Host) {
        (true, true) => (TINY, &[Beside::Nothing, Beside::Products][..]),
        (true, false) => (TINY, &[Beside::Nothing][..]),
        (false, true) => (SMALL, &[Beside::Nothing, Beside::Products][..]),
        (false, false) => (LARGE, &[Beside::Nothing, Beside::Products, Beside::Additions][..]),
    };
    let (mut link, spare) = (Vec::new(), Spare::default());
    for beside in loads {
        // The largest first: what it pins serves all others.
        for kib in sizes.copies_kib.iter().rev() {
            link.push(
                rates(target, Bytes(*kib << 10), *beside, sizes.rounds, &spare)
                    .map_err(|f| RunError::Device(target.name(), f.to_string()))?,
            );
        }
    }
    link.sort_by_key(|l| (l.beside, l.bytes));
    let idle = || link.iter().filter(|l| l.beside == Beside::Nothing);
    let largest = idle().max_by_key(|l| l.bytes).copied().unwrap_or_default();
    let smallest = idle().min_by_key(|l| l.bytes).copied().unwrap_or_default();
    let time = |bytes: Bytes, rate: u64| {
        u64::try_from(u128::from(bytes.0) * 1_000_000_000 / u128::from(rate.max(1)))
            .unwrap_or(u64::MAX)
    };
    let overhead =
        time(smallest.bytes, smallest.h2d).saturating_sub(time(smallest.bytes, largest.h2d));

    let settings = Settings { target: target.clone(), ..Settings::default() };
    let bench = Bench { base, settings: &settings, spare: &spare };
    let work = |graphs: &[Graph], what| bench.work_rate(graphs, what, sizes.rounds);
    let mut products = Vec::new();
    for &extent in sizes.products {
        products.push((extent, work(&[sweep::product(extent)], roofline::flops)?));
    }
    let f32 = products.iter().map(|p| p.1).max().unwrap_or(1).max(1);
    let convolutions: Vec<Graph> = sizes
        .convolutions
        .iter()
        .map(|&(n, c, side)| sweep::square_convolution(n, c, side))
        .collect();
    let reached = work(&convolutions, roofline::flops)?;
    let memory_bandwidth = work(&[sweep::large_add(sizes.addition_mib)], roofline::bytes)?;
    let launch = bench.launch()?;
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
            3 * sizes.addition_mib,
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

/// A device whose operators are timed.
struct Bench<'a> {
    base: &'a Profile,
    settings: &'a Settings,
    spare: &'a Spare,
}

impl Bench<'_> {
    /// The flops of all graphs' operators per second, each at its fastest.
    fn work_rate(
        &self,
        graphs: &[Graph],
        work: fn(&crate::job::Operator) -> u128,
        rounds: usize,
    ) -> Result<u64, RunError> {
        let (mut total, mut time) = (0u128, 0u128);
        for graph in graphs {
            let mut least = u64::MAX;
            for _ in 0..rounds {
                for (start, end) in again(graph, self.base, self.settings, 6, self.spare)?.0 {
                    least = least.min((end - start).0);
                }
            }
            total += graph.operators.first().map_or(0, work);
            time += u128::from(least);
        }
        Ok(u64::try_from(total * 1_000_000_000 / time.max(1)).unwrap_or(u64::MAX))
    }

    /// The time of a step that does next to nothing: the median distance from one start to the
    /// next.
    fn launch(&self) -> Result<Nanos, RunError> {
        let (times, _) = again(&sweep::smallest(), self.base, self.settings, 1000, self.spare)?;
        let distances: Vec<Nanos> = times.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
        Ok(middle(&distances))
    }
}

fn rates(
    target: &Target,
    bytes: Bytes,
    beside: Beside,
    rounds: usize,
    spare: &Spare,
) -> Result<LinkRates, Failure> {
    let rate = |streams: &[Stream]| -> Result<[u64; 3], Failure> {
        let mut best = [0; 3];
        for _ in 0..rounds {
            let now = copies(target, bytes, beside, streams, spare)?;
            best.iter_mut().zip(now).for_each(|(best, now)| *best = now.max(*best));
        }
        Ok(best)
    };
    let (up, down) = (Stream::H2d.index(), Stream::D2h.index());
    let (h2d, d2h, both) =
        (rate(&[Stream::H2d])?, rate(&[Stream::D2h])?, rate(&[Stream::H2d, Stream::D2h])?);
    Ok(LinkRates {
        bytes,
        beside,
        h2d: h2d[up],
        d2h: d2h[down],
        h2d_both: both[up],
        d2h_both: both[down],
    })
}

/// What is run to time copies of one size.
struct Copies {
    /// What is computed beside them.
    graph: Graph,
    /// The copies, then what is computed.
    script: Script,
    /// How many copies there are.
    count: usize,
    /// The device's memory for them, and the host's.
    memory: Bytes,
}

impl Copies {
    /// On two streams the second begins with half a copy, so that copies don't start and end
    /// together.
    fn new(gpu: bool, bytes: Bytes, beside: Beside, streams: &[Stream]) -> Self {
        let repeats = ((64 << 20) / bytes.0.max(1)).clamp(8, 200);
        let mut items = Vec::new();
        for round in 0..repeats {
            for (lane, &stream) in streams.iter().enumerate() {
                let at = Bytes(bytes.in_blocks().0 * lane as u64);
                let bytes = if round == 0 && lane > 0 { Bytes(bytes.0 / 2) } else { bytes };
                let work = Work::Copy { device: at, host: at, bytes };
                items.push(Item {
                    stream,
                    waits: Vec::new(),
                    fetches: Vec::new(),
                    stretch: None,
                    trigger: None,
                    work,
                    top: Bytes::ZERO,
                });
            }
        }
        let memory = Bytes(bytes.in_blocks().0 * streams.len() as u64);
        let (count, mut arena) = (items.len(), memory);
        let mut graph = Graph {
            name: String::new(),
            tensors: Vec::new(),
            operators: Vec::new(),
            optimizer: None,
            loss: None,
            recorded_peak: None,
            origin: None,
        };
        if beside != Beside::Nothing && gpu {
            graph = match beside {
                Beside::Additions => sweep::large_add(LARGE.addition_mib),
                _ => sweep::product(MEANWHILE),
            };
            let (step, _) = first(&graph, memory);
            arena = step.top;
            // More than half a millisecond each, so about as long as copies at 50 GB/s.
            let enough = (repeats * bytes.0 / (25 << 20)).clamp(8, 400);
            items.extend((0..enough).map(|_| step.clone()));
        }
        let mut script = alike(items, arena, memory);
        // Products first: they are there when the first copy goes.
        script.order.rotate_left(count);
        Self { graph, script, count, memory }
    }

    /// By stream, the rate of copies of `bytes`. A stream that copies alone: its fastest copy's.
    /// Of two, and beside other work, the median, because the last copies may run alone; copies
    /// that end after the other work are left out, unless all do.
    fn rates(&self, measured: &Measured, bytes: Bytes) -> [u64; 3] {
        let loaded = measured.items[self.count..].iter().map(|item| item.1).max();
        let streams = self.script.streams[1..].iter().filter(|s| !s.is_empty()).count();
        let mut rates = [0; 3];
        for stream in [Stream::H2d, Stream::D2h] {
            let copies = &self.script.streams[stream.index()];
            let timed: Vec<(Nanos, Nanos)> = copies
                .iter()
                .filter(|&&i| !(streams > 1 && i == 1))
                .map(|&i| measured.items[i])
                .collect();
            let beside = timed.iter().filter(|copy| loaded.is_none_or(|end| copy.1 <= end));
            let mut times: Vec<Nanos> = beside.map(|copy| copy.1 - copy.0).collect();
            if times.is_empty() {
                times = timed.iter().map(|copy| copy.1 - copy.0).collect();
            }
            let time = if streams == 1 && loaded.is_none() {
                times.iter().copied().min().unwrap_or_default()
            } else {
                middle(&times)
            };
            if !times.is_empty() {
                let rate = u128::from(bytes.0) * 1_000_000_000 / u128::from(time.0.max(1));
                rates[stream.index()] = u64::try_from(rate).unwrap_or(u64::MAX);
            }
        }
        rates
    }
}

fn copies(
    target: &Target,
    bytes: Bytes,
    beside: Beside,
    streams: &[Stream],
    spare: &Spare,
) -> Result<[u64; 3], Failure> {
    let copies = Copies::new(*target != Target::Host, bytes, beside, streams);
    let options = host::Options {
        link: LinkRate::Unlimited,
        throttle_per_mille: 1000,
        throttle_later: Vec::new(),
        load_percent: if beside == Beside::Nothing || *target != Target::Host { 0 } else { LOAD },
        poison: false,
        jitter: Nanos::ZERO,
        member: None,
    };
    let (measured, _) = open(
        (target, None, spare),
        &copies.graph,
        (&copies.script, &BTreeMap::new()),
        host::kernels::find,
        &[],
        &options,
        |device| {
            // Otherwise the first access to each page would be measured.
            let ones = vec![1; usize::try_from(copies.memory.0).unwrap_or(0)];
            device.write(super::backend::Memory::Device, Bytes::ZERO, &ones)?;
            device.write(super::backend::Memory::Host, Bytes::ZERO, &ones)?;
            once(device, &copies.script)
        },
    )?;
    Ok(copies.rates(&measured?, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_timed_each_way_and_together() {
        let spare = Spare::default();
        let one = rates(&Target::Host, Bytes(64 << 10), Beside::Nothing, 1, &spare).unwrap();
        assert!(
            [one.h2d, one.d2h, one.h2d_both, one.d2h_both].iter().all(|&r| r > 1_000_000),
            "{one:?}"
        );
        let base = crate::device::builtin::find("host").unwrap();
        let bench = Bench { base: &base, settings: &Settings::default(), spare: &spare };
        assert!(bench.launch().unwrap() > Nanos::ZERO);
    }

    /// An H100 has 132 multiprocessors and 50 MiB of cache. A product's tile is at most 256 x 128.
    #[test]
    fn what_is_measured_fills_a_large_gpu() {
        let kib = LARGE.copies_kib;
        assert_eq!((kib.first(), kib.last()), (Some(&4), Some(&(512 << 10))));
        assert!(kib.windows(2).all(|two| two[0] < two[1] && two[1] <= 16 * two[0]), "{kib:?}");
        let tiles = |extent: u64| (extent / 256) * (extent / 128);
        let largest = LARGE.products.last().copied().unwrap_or(0);
        assert!(tiles(largest) >= 4 * 132 && tiles(MEANWHILE) >= 2 * 132);
        let add = sweep::large_add(LARGE.addition_mib);
        assert!(add.tensors.iter().all(|tensor| tensor.bytes.0 >= 10 * (50 << 20)));
    }

    #[test]
    fn copies_run_beside_what_else_is_measured() {
        for &kib in LARGE.copies_kib {
            for beside in [Beside::Nothing, Beside::Products, Beside::Additions] {
                let bytes = Bytes(kib << 10);
                let both = Copies::new(true, bytes, beside, &[Stream::H2d, Stream::D2h]);
                let streams = &both.script.streams;
                let of = |index: usize| match both.script.items[index].work {
                    Work::Copy { device, bytes, .. } => (device, bytes),
                    Work::Step(_) => panic!("{index} is no copy"),
                };
                // As many each way, in bytes of their own, and not in step.
                assert_eq!(streams[1].len(), streams[2].len());
                assert_eq!((of(0), of(1).1), ((Bytes::ZERO, bytes), Bytes(bytes.0 / 2)));
                assert!(of(1).0 >= bytes && of(1).0 + bytes <= both.memory);
                assert_eq!(streams[0].is_empty(), beside == Beside::Nothing);
                // What is computed touches none of them, and is submitted first.
                assert!(streams[0].is_empty() || both.script.order[0] == streams[0][0]);
                for &step in &streams[0] {
                    let Work::Step(work) = &both.script.items[step].work else { panic!("a copy") };
                    assert!(work.addresses.iter().all(|&(_, at)| at >= both.memory));
                }
            }
        }
    }

    #[test]
    fn copies_that_end_after_the_load_are_left_out() {
        let mebi = Bytes(1 << 20);
        let timed = |copies: &Copies, load: u64| {
            let mut measured = Measured::default();
            for at in 0..copies.script.items.len() as u64 {
                // Copies of 20 ns beside the load, of 10 ns later.
                let at = at.min(copies.count as u64);
                let (start, time) = if at < 4 { (20 * at, 20) } else { (80 + 10 * (at - 4), 10) };
                measured.items.push((Nanos(start), Nanos(start + time)));
            }
            for item in &mut measured.items[copies.count..] {
                *item = (Nanos::ZERO, Nanos(load));
            }
            copies.rates(&measured, mebi)[Stream::H2d.index()]
        };
        let rate = |nanos: u64| (1 << 20) * 1_000_000_000 / nanos;
        let alone = Copies::new(true, mebi, Beside::Nothing, &[Stream::H2d]);
        assert_eq!(timed(&alone, 0), rate(10));
        let beside = Copies::new(true, mebi, Beside::Additions, &[Stream::H2d]);
        assert_eq!((timed(&beside, 85), timed(&beside, 10)), (rate(20), rate(10)));
    }
}
