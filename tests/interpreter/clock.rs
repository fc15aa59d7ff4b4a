//! The same machine on a clock: nanosecond after nanosecond, everything starts as soon as it may.

use super::read::What;
use super::{Machine, Outcome};

/// What a steady iteration takes and holds.
pub struct Measured {
    pub iteration_ns: u64,
    pub peak_bytes: u64,
}

impl Machine<'_> {
    /// One iteration without noise.
    pub fn measure(mut self) -> Outcome<Measured> {
        self.load()?;
        self.forget();
        let link = self.plan.device.link;
        let job = &self.plan.jobs[0];
        let rates = [(0, 0), (link.d2h, link.d2h_contended), (link.h2d, link.h2d_contended)];
        let mut stopped = vec![0u64; self.started.len()];
        // What each running task has left: nanoseconds of a step, units of a copy.
        let mut left: Vec<Option<i128>> = vec![None; self.started.len()];
        let (mut now, mut peak) = (0u64, 0);
        loop {
            for task in 0..left.len() {
                if left[task].is_some_and(|l| l <= 0) {
                    left[task] = None;
                    self.finish(task)?;
                    stopped[task] = now;
                }
            }
            let mut more = true;
            while more {
                more = false;
                for (lane, rate) in rates.iter().enumerate() {
                    let Some(task) = self.front(lane).filter(|t| !self.started[*t]) else {
                        continue;
                    };
                    let what = self.reading.tasks[task].clone();
                    if lane != 0 {
                        let begun = what.trigger.map_or(0, |t| stopped[t]);
                        if now < begun {
                            continue;
                        }
                    }
                    if self.may_start(task) {
                        self.start(task)?;
                        left[task] = Some(match what.what {
                            What::Step(operator, _) => i128::from(job.latencies[operator].time.0),
                            What::Out(tensor, _) | What::In(tensor, _) => {
                                let bytes = i128::from(self.graph.tensors[tensor].bytes.0);
                                bytes * 1_000_000_000
                                    + i128::from(link.overhead_ns) * i128::from(rate.0)
                            }
                        });
                        more = true;
                    }
                }
            }
            peak = self.memory.iter().filter(|b| b.0 != 0).count().max(peak);
            if self.ended.iter().all(|e| *e) {
                return Ok(Measured { iteration_ns: now, peak_bytes: peak as u64 * 512 });
            }
            if now > 10_000_000 {
                return Err("deadlock".to_owned());
            }
            now += 1;
            let lane =
                |task: &usize| (0..3).find(|l| self.reading.lanes[*l].contains(task)).unwrap_or(0);
            let lanes: Vec<(usize, usize)> =
                (0..left.len()).filter(|t| left[*t].is_some()).map(|t| (t, lane(&t))).collect();
            let both = [1, 2].iter().all(|l| lanes.iter().any(|(_, lane)| lane == l));
            for (task, lane) in lanes {
                let rate =
                    if lane == 0 { 1 } else { if both { rates[lane].1 } else { rates[lane].0 } };
                left[task] = left[task].map(|l| l - i128::from(rate));
            }
        }
    }
}
