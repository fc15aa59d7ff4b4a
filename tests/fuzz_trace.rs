//! Damaged traces through the library: any answer will do, but no panic, no hang, and no more memory than
//! [`Limits::memory`] states. `NEAP_CASES` sets another number of cases.

mod common;

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use common::counting::{Counting, Since};
use common::random::Random;
use common::seeds;
use neap::estimate::attribution::Places;
use neap::estimate::forecast::{Forecast, Job};
use neap::estimate::gpu::{Class, Settings};
use neap::estimate::trace::{LARGEST_BLOCK, Limits, Trace, parse, read};
use neap::estimate::what_if::WhatIf;
use neap::estimate::{answer, xmem};
use neap::sim::allocator::Config;
use neap::units::Bytes;

#[global_allocator]
static COUNTING: Counting = Counting;

/// Texts that mean something to the reader.
const TOKENS: [&str; 40] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    ",",
    ":",
    "null",
    "NaN",
    "-Infinity",
    "1e400",
    "-1",
    "0",
    "18446744073709551615",
    "9223372036854775807.999",
    "\"ph\"",
    "\"X\"",
    "\"B\"",
    "\"E\"",
    "\"i\"",
    "\"cat\"",
    "\"cpu_op\"",
    "\"user_annotation\"",
    "\"python_function\"",
    "\"name\"",
    "\"[memory]\"",
    "\"nn.Module: A_0\"",
    "\"ProfilerStep#9\"",
    "\"args\"",
    "\"ts\"",
    "\"dur\"",
    "\"tid\"",
    "\"Bytes\"",
    "\"Addr\"",
    "\"traceEvents\"",
    "\"nodes\"",
    "\\ud83d",
    "\u{feff}",
    "\0",
];

impl Random {
    /// Up to eight of: a bit flipped, a stretch cut out, repeated elsewhere or over and over, the end cut off, a token put in or put
    /// in the place of another, two tokens swapped.
    fn damage(&mut self, text: &mut Vec<u8>) {
        for _ in 0..=self.below(8) {
            let at = self.below(text.len());
            let end = (at + 1 + self.below(300)).min(text.len());
            let token = TOKENS[self.below(TOKENS.len())];
            match self.below(12) {
                0..3 if at < text.len() => text[at] ^= 1 << self.below(8),
                3 => drop(text.drain(at..end)),
                4 => {
                    let (piece, to) = (text[at..end].to_vec(), self.below(text.len()));
                    text.splice(to..to, piece);
                }
                5 => {
                    let piece = text[at..end].repeat(1 + self.below(50));
                    text.splice(at..at, piece);
                }
                6 => text.truncate(text.len() - self.below(text.len()) / 8),
                7 => drop(text.splice(at..at, token.bytes())),
                8 => drop(text.splice(at..at, token.repeat(1 + self.below(300)).into_bytes())),
                _ => {
                    let (first, second) = (word(text, at), word(text, self.below(text.len())));
                    let with = if self.below(2) == 0 {
                        token.as_bytes().to_vec()
                    } else {
                        text[second.clone()].to_vec()
                    };
                    if first.end <= second.start {
                        let piece = text[first.clone()].to_vec();
                        text.splice(second, piece);
                    }
                    text.splice(first, with);
                }
            }
        }
    }

    fn limits(&mut self) -> Limits {
        let mut pick = |small: usize, whole: u64| {
            if self.below(3) == 0 { self.below(small) as u64 } else { whole }
        };
        Limits {
            records_bytes: pick(2_000, 1 << 20),
            texts_bytes: pick(5_000, 1 << 18),
            event_bytes: pick(1_000, 1 << 14) as usize,
        }
    }
}

/// The string, or the run of other bytes than delimiters, at or after `at`.
fn word(text: &[u8], at: usize) -> std::ops::Range<usize> {
    let delimiter = |b: &u8| b" \n,:[]{}".contains(b);
    let from = text[at..].iter().position(|b| !delimiter(b)).map_or(text.len(), |p| at + p);
    from..text[from..].iter().position(delimiter).map_or(text.len(), |p| from + p)
}

/// A few events of each kind from the recorded trace, with its header and end; and the same as a bare list, and with `B` and `E`.
fn samples() -> [Vec<u8>; 3] {
    let mut text = String::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/traces/tiny_cnn-adam-8-32-start.profile.json.gz");
    neap::files::open(&path).unwrap().read_to_string(&mut text).unwrap();
    let (header, rest) = text.split_once("\"traceEvents\": [\n").unwrap();
    let (events, end) = rest.rsplit_once("\n  ],").unwrap();
    let kinds = ["\"cpu_op\"", "[memory]", "nn.Module", "user_annotation", "\"ph\": \"M\""];
    let some = kinds.map(|kind| {
        events
            .split("\n  },\n")
            .filter(|e| e.contains(kind))
            .take(4)
            .collect::<Vec<_>>()
            .join("\n  },\n")
    });
    let some = some.join("\n  },\n") + "\n  }";
    let bare = format!("[{some}]");
    let pairs = some.replacen("\"X\"", "\"B\"", 5).replace("\"ph\": \"M\"", "\"ph\": \"E\"");
    [
        format!("{header}\"traceEvents\": [\n{some}\n  ],{end}"),
        bare,
        format!("{header}\"traceEvents\": [{pairs}]}}"),
    ]
    .map(String::into_bytes)
}

/// An endless trace, made as it is read: what comes first, then `next(0)`, `next(1)`, ….
struct Endless<F> {
    pending: Vec<u8>,
    at: usize,
    count: u64,
    left: usize,
    next: F,
}

impl<F: Fn(u64) -> String> Read for Endless<F> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.pending.len() {
            self.pending = (self.next)(self.count).into_bytes();
            (self.at, self.count) = (0, self.count + 1);
        }
        let n = buffer.len().min(self.pending.len() - self.at).min(self.left);
        buffer[..n].copy_from_slice(&self.pending[self.at..self.at + n]);
        (self.at, self.left) = (self.at + n, self.left - n);
        Ok(n)
    }
}

/// Traces made to fill memory, each many times its limits.
fn hostile() {
    const BYTES: usize = 8 << 20;
    let limits = Limits { records_bytes: 1 << 20, texts_bytes: 1 << 20, event_bytes: 1 << 16 };
    let event = |rest: String| format!(r#"{{"ph":"X","cat":"cpu_op","ts":1,{rest}}},"#);
    let memory = r#"{"ph":"i","name":"[memory]","ts":0,"args":{"Addr":1,"Bytes":1}},"#;
    type Next = Box<dyn Fn(u64) -> String>;
    let streams: [(&str, &str, Next); 12] = [
        ("different names", "take more than", Box::new(move |i| event(format!(r#""name":"{i}""#)))),
        (
            "different arguments",
            "take more than",
            Box::new(move |i| {
                event(format!(r#""args":{{"Input Dims":[{}]}}"#, i % 999))
                    + &event(format!(r#""args":{{"Input type":[{i}]}}"#))
            }),
        ),
        ("different threads", "take more than", Box::new(move |i| event(format!(r#""tid":{i}"#)))),
        (
            "begun and never ended",
            "don't end",
            Box::new(|i| format!(r#"{{"ph":"B","cat":"x","tid":{},"ts":{i}}},"#, i % 500)),
        ),
        (
            "all at one instant",
            "at one instant",
            Box::new(move |_| event(r#""name":"a""#.to_owned())),
        ),
        (
            "one long string",
            "ends before any memory event",
            Box::new(|i| if i == 0 { "{\"name\":\"".to_owned() } else { "x\\\"}".repeat(99) }),
        ),
        ("nothing but depth", "not JSON", Box::new(|_| "{\"ph\":[".repeat(99))),
        ("nothing but braces", "not JSON", Box::new(|_| "{".repeat(999))),
        ("a comma after the other", "ends before any memory event", Box::new(|_| ", ".repeat(999))),
        (
            "more events than records",
            "",
            Box::new(move |i| {
                format!(
                    r#"{{"ph":"X","cat":"cpu_op","name":"a","ts":{i}}},{}"#,
                    memory.replace("\"ts\":0", &format!("\"ts\":{i}"))
                )
            }),
        ),
        (
            "the latest first",
            "",
            Box::new(move |i| memory.replace("\"ts\":0", &format!("\"ts\":-{i}"))),
        ),
        (
            "long names",
            "take more than",
            Box::new(move |i| event(format!(r#""name":"{i}{}""#, "\\n".repeat(30_000)))),
        ),
    ];
    for (name, refusal, next) in streams {
        let source = Endless { pending: b"[".to_vec(), at: 0, count: 0, left: BYTES, next };
        let memory = Since::now();
        let answer = parse(source, Path::new("t.json"), &limits);
        let peak = memory.peak() as u64;
        assert!(
            peak <= limits.memory().0,
            "{name}: {peak} bytes, stated are {}",
            limits.memory().0
        );
        match answer {
            Ok(trace) => {
                assert!(refusal.is_empty() && !trace.notes.is_empty(), "{name}: {:?}", trace.notes)
            }
            Err(e) => {
                assert!(!refusal.is_empty() && e.to_string().contains(refusal), "{name}: {e}")
            }
        }
    }
}

/// What a command does with a trace that was read.
fn estimated(random: &mut Random, trace: Trace) {
    let class = Class { capability: 9, multiprocessors: 132, threads: 2048 };
    let job = Job::new(trace);
    let settings = Settings { class, without: Vec::new(), cudnn_workspace: LARGEST_BLOCK };
    let mut forecast = match random.below(4) {
        0 => xmem::forecast(&job),
        1 => "zero-grad=start,dtype=bf16"
            .parse::<WhatIf>()
            .unwrap()
            .apply(&job, Forecast::new(&job, &settings)),
        2 => "zero-grad=backward"
            .parse::<WhatIf>()
            .unwrap()
            .apply(&job, Forecast::new(&job, &settings)),
        _ => Forecast::new(&job, &settings),
    };
    let answer = answer::peaks(&job, &mut forecast, &Config::default());
    let _ = (answer.wanted(), answer.verdict(&forecast, &Config::default(), Bytes(1 << 34)));
    let _ = Places::new(&job).by_module(&forecast, &answer);
}

/// What everything that uses a trace relies on.
fn holds_together(trace: &Trace) {
    assert!(!trace.memory.is_empty());
    assert!(
        trace.ops.is_sorted_by_key(|o| (o.start, std::cmp::Reverse(o.end)))
            && trace.memory.is_sorted_by_key(|m| m.time)
    );
    for op in &trace.ops {
        let args = trace.args[op.args as usize];
        let texts = [args.dims, args.strides, args.types, args.concrete].into_iter().flatten();
        assert!(
            texts.chain([op.name]).all(|t| (t.0 as usize) < trace.texts.len())
                && op.start <= op.end
        );
    }
    let names = trace.marks.iter().map(|m| m.name).chain(trace.modules.iter().map(|m| m.name));
    assert!(names.into_iter().all(|t| (t.0 as usize) < trace.texts.len()));
}

#[test]
fn damaged_traces_are_answered_within_the_stated_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json.gz");
    hostile();
    let samples = samples();
    let (mut read_well, mut refused) = (0, 0);
    let mut inputs = 0;
    for seed in seeds(33_000) {
        inputs += 1;
        let mut random = Random(seed);
        let mut text = samples[random.below(3)].clone();
        random.damage(&mut text);
        let limits = random.limits();
        // One in sixteen goes through a file: compressed, and then half of them damaged once more.
        let from_file = random.below(16) == 0;
        if from_file {
            let mut coder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            coder.write_all(&text).unwrap();
            let mut compressed = coder.finish().unwrap();
            if random.below(2) == 0 {
                random.damage(&mut compressed);
            }
            std::fs::write(&path, compressed).unwrap();
        }
        let (memory, began) = (Since::now(), Instant::now());
        let result = std::panic::catch_unwind(|| {
            let answer = if from_file {
                read(&path, &limits)
            } else {
                parse(&text[..], Path::new("t.json"), &limits)
            };
            answer.as_ref().ok().into_iter().for_each(holds_together);
            answer
        });
        let peak = memory.peak() as u64;
        let Ok(answer) = result else { panic!("seed {seed}: it panics") };
        assert!(peak <= limits.memory().0, "seed {seed}: {peak} bytes with {limits:?}");
        // Each takes a few milliseconds; this is far beyond what a busy machine adds.
        assert!(began.elapsed() < Duration::from_secs(20), "seed {seed}: {:?}", began.elapsed());
        if answer.is_ok() {
            read_well += 1
        } else {
            refused += 1
        }
        if let Ok(trace) = answer
            && seed % 8 == 0
        {
            let result = std::panic::catch_unwind(move || estimated(&mut random, trace));
            assert!(result.is_ok(), "seed {seed}: its estimate panics");
        }
    }
    println!("{read_well} read, {refused} refused");
    assert!(
        inputs < 1_000 || (read_well > inputs / 10 && refused > inputs / 10),
        "the damage is too small or too large to tell"
    );
}
