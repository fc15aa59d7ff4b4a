//! Forecasts of an edited script (`--what-if zero-grad=start|backward,dtype=bf16`). No edit changes
//! shapes or which operators run.
//!
//! Accuracy ([`WhatIf::accuracy`]) was measured on real traces: edited forecasts were compared with
//! PyTorch 2.11's allocator running the edited script, on models of torchvision and transformers
//! with SGD, Adam, AdamW, RMSprop, Adagrad and Adafactor.

mod bf16;
mod zero_grad;

use std::collections::BTreeMap;
use std::str::FromStr;

use super::forecast::{Forecast, Job};
use crate::sim::requests::Request;

/// Where a script clears gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroGrad {
    /// Before the model is called.
    Start,
    /// Before backward.
    Backward,
}

/// A measured error, in hundredths of a percent, over a number of jobs.
struct Measured {
    edit: &'static str,
    jobs: u32,
    reserved: [u32; 2],
    allocated: [u32; 2],
}

/// 14 jobs recorded with `start` and 8 with `backward`, each estimated for the other.
const ZERO_GRAD: Measured =
    Measured { edit: "zero-grad", jobs: 22, reserved: [0, 97], allocated: [0, 156] };
/// Jobs without Adafactor: 9 convolutional models, 2 vision transformers, 9 language models.
/// Attention used the flash kernel. The worst, T5 in reserved and GPT-Neo in allocated, are too
/// low, probably because they compute some parts in single precision (RMS norms, attention).
const BF16: Measured =
    Measured { edit: "dtype=bf16", jobs: 20, reserved: [0, 561], allocated: [15, 641] };
/// The two jobs with Adafactor, ResNet-18 and T5, both too low.
const BF16_ADAFACTOR: Measured = Measured {
    edit: "dtype=bf16 with Adafactor",
    jobs: 2,
    reserved: [1849, 2586],
    allocated: [953, 1148],
};

impl Measured {
    fn sentence(&self) -> String {
        let percent = |hundredths: u32| format!("{}.{:02} %", hundredths / 100, hundredths % 100);
        let [[r, rr], [a, aa]] = [self.reserved, self.allocated].map(|m| m.map(percent));
        format!(
            "{}: on {} jobs, peak reserved was off by {r} in the median and {rr} at worst, peak allocated by {a} and {aa}",
            self.edit, self.jobs
        )
    }
}

/// The edits to make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WhatIf {
    /// Where gradients are cleared, if that changes.
    pub zero_grad: Option<ZeroGrad>,
    /// Whether the job runs in bf16.
    pub bf16: bool,
}

/// An edit that neap does not know.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "'{0}' is no edit of a forecast, or comes twice; known are zero-grad=start, zero-grad=backward and dtype=bf16, separated by commas"
)]
pub struct WhatIfError(String);

impl FromStr for WhatIf {
    type Err = WhatIfError;

    fn from_str(text: &str) -> Result<Self, WhatIfError> {
        let mut what_if = Self::default();
        for word in text.split(',').map(str::trim) {
            match word {
                "zero-grad=start" if what_if.zero_grad.is_none() => {
                    what_if.zero_grad = Some(ZeroGrad::Start)
                }
                "zero-grad=backward" if what_if.zero_grad.is_none() => {
                    what_if.zero_grad = Some(ZeroGrad::Backward)
                }
                "dtype=bf16" if !what_if.bf16 => what_if.bf16 = true,
                _ => return Err(WhatIfError(word.to_owned())),
            }
        }
        Ok(what_if)
    }
}

impl WhatIf {
    /// The edited forecast of `job`. Call it before [`super::answer::answer`], which repeats
    /// iterations.
    #[must_use]
    pub fn apply(&self, job: &Job, mut forecast: Forecast) -> Forecast {
        if let Some(zero_grad) = self.zero_grad {
            forecast = zero_grad::moved(job, &forecast, zero_grad);
        }
        if self.bf16 {
            forecast = bf16::halved(job, forecast);
        }
        forecast
    }

    /// The measured errors of these edits, one sentence each.
    #[must_use]
    pub fn accuracy(&self) -> Vec<String> {
        let edits = [
            self.zero_grad.map(|_| &ZERO_GRAD),
            self.bf16.then_some(&BF16),
            self.bf16.then_some(&BF16_ADAFACTOR),
        ];
        edits.into_iter().flatten().map(Measured::sentence).collect()
    }
}

/// The forecast without the requests marked in `gone`, and with each of `inserts` before the
/// request at its position.
fn splice(forecast: &Forecast, gone: &[bool], inserts: &BTreeMap<usize, Vec<Request>>) -> Forecast {
    let Forecast { requests, times, starts, .. } = forecast;
    let mut result = Forecast {
        requests: Vec::with_capacity(requests.len()),
        times: Vec::with_capacity(times.len()),
        starts: Vec::new(),
        ..forecast.clone()
    };
    let mut next = starts.iter().copied().peekable();
    for index in 0..=requests.len() {
        while next.next_if(|&s| s <= index).is_some() {
            result.starts.push(result.requests.len());
        }
        let time = times.get(index).or(times.last()).copied().unwrap_or(0);
        for &request in inserts.get(&index).into_iter().flatten() {
            result.requests.push(request);
            result.times.push(time);
        }
        if index < requests.len() && !gone[index] {
            result.requests.push(requests[index]);
            result.times.push(time);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Settings;
    use crate::trace::{Limits, parse};

    fn op(name: &str, start: u64, length: u64, more: &str) -> String {
        format!(
            r#"{{"ph":"X","cat":"cpu_op","name":"{name}","pid":1,"tid":1,"ts":{start},"dur":{length},"args":{{{more}}}}}"#
        )
    }

    fn mark(name: &str, start: u64, length: u64) -> String {
        format!(
            r#"{{"ph":"X","cat":"user_annotation","name":"{name}","pid":1,"tid":1,"ts":{start},"dur":{length}}}"#
        )
    }

    fn memory(time: u64, address: u64, bytes: i64) -> String {
        format!(
            r#"{{"ph":"i","cat":"cpu_instant_event","name":"[memory]","pid":1,"tid":1,"ts":{time},"args":{{"Addr":{address},"Bytes":{bytes},"Device Type":0}}}}"#
        )
    }

    /// Two iterations: ids and an activation, and a gradient that the second iteration clears at
    /// `cleared` (30 or 50).
    fn job(cleared: u64) -> Job {
        let mut events = Vec::new();
        for round in 0..2_u64 {
            let t = |time: u64| round * 100 + time;
            let single = r#""Input Dims":[[250]],"Input type":["float"],"Concrete Inputs":[""]"#;
            events.push(mark(&format!("ProfilerStep#{round}"), t(1), 98));
            events.push(mark("Optimizer.zero_grad#SGD.zero_grad", t(cleared), 2));
            events
                .push(format!(r#"{{"ph":"X","cat":"python_function","name":"nn.Module: Net_0","pid":1,"tid":1,"ts":{},"dur":10}}"#, t(35)));
            events.push(op(
                "aten::empty",
                t(10),
                5,
                r#""Input Dims":[[],[],[],[],[],[]],"Input type":["ScalarList"],"Concrete Inputs":["[100]","4","","","",""]"#,
            ));
            events.push(op("aten::relu", t(40), 5, single));
            events.push(op("autograd::engine::evaluate_function: ReluBackward0", t(60), 10, ""));
            events.push(op("aten::mul", t(62), 4, single));
            events.push(mark("Optimizer.step#SGD.step", t(80), 5));
            events.push(memory(t(12), 1, 800));
            events.push(memory(t(42), 2, 1000));
            events.push(memory(t(63), 3 + round, 1000));
            if round == 1 {
                events.push(memory(t(cleared + 1), 3, -1000));
            }
            events.push(memory(t(70), 2, -1000));
            events.push(memory(t(90), 1, -800));
        }
        let text = format!(r#"{{"traceEvents":[{}]}}"#, events.join(","));
        Job::new(
            parse(std::io::Cursor::new(text.into_bytes()), "t".as_ref(), &Limits::default())
                .unwrap(),
        )
    }

    fn settings() -> Settings {
        let class = crate::gpu::Class { capability: 9, multiprocessors: 132, threads: 2048 };
        Settings { class, without: vec![crate::gpu::Rule::Before], cudnn_workspace: 0 }
    }

    #[test]
    fn gradients_are_cleared_where_asked_and_nothing_else_moves() {
        let (early, late) = (job(30), job(50));
        let [start, backward] =
            ["zero-grad=start", "zero-grad=backward"].map(|w| w.parse::<WhatIf>().unwrap());
        let [of_early, of_late] = [&early, &late].map(|j| Forecast::new(j, &settings()));
        assert_ne!(of_early.requests, of_late.requests);
        assert_eq!(backward.apply(&early, of_early.clone()).requests, of_late.requests);
        assert_eq!(start.apply(&late, of_late.clone()).requests, of_early.requests);
        let same = start.apply(&early, of_early.clone());
        assert_eq!((same.requests, same.starts), (of_early.requests, of_early.starts));
    }

    #[test]
    fn single_precision_is_halved_and_integers_are_not() {
        let job = job(30);
        let forecast =
            "dtype=bf16".parse::<WhatIf>().unwrap().apply(&job, Forecast::new(&job, &settings()));
        let sizes: Vec<u64> = forecast.blocks.iter().map(|b| b.bytes).collect();
        assert_eq!(sizes, [800, 500, 500, 800, 500, 500]);
        let asked = forecast.requests.iter().filter_map(|r| {
            if let Request::Allocate { id, bytes, .. } = r {
                Some((*id as usize, bytes.0))
            } else {
                None
            }
        });
        assert!(asked.clone().all(|(id, bytes)| sizes[id] == bytes) && asked.count() == 6);
    }

    #[test]
    fn edits_are_named_once_and_accuracy_goes_with_them() {
        let both: WhatIf = "dtype=bf16, zero-grad=start".parse().unwrap();
        assert_eq!(both, WhatIf { zero_grad: Some(ZeroGrad::Start), bf16: true });
        assert_eq!(both.accuracy().len(), 3);
        for wrong in [
            "",
            "zero-grad",
            "zero-grad=never",
            "dtype=fp16",
            "dtype=bf16,dtype=bf16",
            "zero-grad=start,zero-grad=backward",
        ] {
            assert!(
                wrong
                    .parse::<WhatIf>()
                    .unwrap_err()
                    .to_string()
                    .contains("zero-grad=backward and dtype=bf16"),
                "{wrong}"
            );
        }
    }
}
