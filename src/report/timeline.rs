//! Timelines in Chrome's trace format, which <https://ui.perfetto.dev> opens.
//!
//! A job is a process. Its compute stream and each direction of its link are tracks, its memory is
//! a counter. Events are written as they come, so a million of them take no memory.

use std::io::{self, Write};

use crate::units::Nanos;

/// A row of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Track {
    process: u32,
    thread: u32,
}

/// An activity on a track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span<'a> {
    /// Its label.
    pub name: &'a str,
    /// When it begins.
    pub start: Nanos,
    /// How long it takes.
    pub duration: Nanos,
    /// Details, shown when the span is clicked.
    pub args: &'a [(&'a str, Value<'a>)],
}

/// A detail of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A text.
    Text(&'a str),
    /// A count, such as bytes.
    Number(u64),
}

/// Writes one timeline. Call [`Writer::finish`] at the end.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    first: bool,
    processes: u32,
    threads: u32,
}

impl<W: Write> Writer<W> {
    /// Starts a timeline. Give it a buffered writer.
    ///
    /// # Errors
    /// When writing fails, here and in the other methods.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        Ok(Self { out, first: true, processes: 0, threads: 0 })
    }

    /// Adds a group of tracks, such as a job, with these tracks in this order.
    ///
    /// # Errors
    /// When writing fails.
    pub fn process<const N: usize>(
        &mut self,
        name: &str,
        tracks: [&str; N],
    ) -> io::Result<(u32, [Track; N])> {
        self.processes += 1;
        let process = self.processes;
        self.metadata("process_name", process, 0, "name", Value::Text(name))?;
        self.metadata(
            "process_sort_index",
            process,
            0,
            "sort_index",
            Value::Number(process.into()),
        )?;
        let mut made = [Track { process, thread: 0 }; N];
        for (track, name) in made.iter_mut().zip(tracks) {
            self.threads += 1;
            track.thread = self.threads;
            self.metadata("thread_name", process, track.thread, "name", Value::Text(name))?;
            self.metadata(
                "thread_sort_index",
                process,
                track.thread,
                "sort_index",
                Value::Number(track.thread.into()),
            )?;
        }
        Ok((process, made))
    }

    /// Adds a span to a track. Spans of a track must not overlap.
    ///
    /// # Errors
    /// When writing fails.
    pub fn span(&mut self, track: Track, span: &Span<'_>) -> io::Result<()> {
        self.begin("X", track.process, track.thread, span.name)?;
        self.time("ts", span.start)?;
        self.time("dur", span.duration)?;
        self.args(span.args)
    }

    /// Sets a process's counter from `at` on: one value for each series, such as resident bytes and
    /// budget.
    ///
    /// # Errors
    /// When writing fails.
    pub fn counter(
        &mut self,
        process: u32,
        name: &str,
        at: Nanos,
        series: &[(&str, u64)],
    ) -> io::Result<()> {
        self.begin("C", process, 0, name)?;
        self.time("ts", at)?;
        self.out.write_all(b",\"args\":{")?;
        for (index, (name, value)) in series.iter().enumerate() {
            self.pair(index, name, Value::Number(*value))?;
        }
        self.out.write_all(b"}}")
    }

    /// Ends the timeline and flushes it.
    ///
    /// # Errors
    /// When writing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(b"\n]}\n")?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn metadata(
        &mut self,
        what: &str,
        process: u32,
        thread: u32,
        key: &str,
        value: Value<'_>,
    ) -> io::Result<()> {
        self.begin("M", process, thread, what)?;
        self.args(&[(key, value)])
    }

    fn begin(&mut self, phase: &str, process: u32, thread: u32, name: &str) -> io::Result<()> {
        self.out.write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        write!(self.out, "{{\"ph\":\"{phase}\",\"pid\":{process},\"tid\":{thread},\"name\":")?;
        serde_json::to_writer(&mut self.out, name).map_err(io::Error::from)
    }

    /// Writes a time: the format counts in microseconds, with nanoseconds as decimals.
    fn time(&mut self, key: &str, time: Nanos) -> io::Result<()> {
        write!(self.out, ",\"{key}\":{}.{:03}", time.0 / 1_000, time.0 % 1_000)
    }

    fn args(&mut self, args: &[(&str, Value<'_>)]) -> io::Result<()> {
        if !args.is_empty() {
            self.out.write_all(b",\"args\":{")?;
            for (index, (key, value)) in args.iter().enumerate() {
                self.pair(index, key, *value)?;
            }
            self.out.write_all(b"}")?;
        }
        self.out.write_all(b"}")
    }

    fn pair(&mut self, index: usize, key: &str, value: Value<'_>) -> io::Result<()> {
        if index > 0 {
            self.out.write_all(b",")?;
        }
        serde_json::to_writer(&mut self.out, key)?;
        self.out.write_all(b":")?;
        match value {
            Value::Text(text) => {
                serde_json::to_writer(&mut self.out, text).map_err(io::Error::from)
            }
            Value::Number(number) => write!(self.out, "{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_timeline_is_exactly_this() {
        let mut writer = Writer::new(Vec::new()).unwrap();
        let (job, [compute, h2d]) = writer.process("tiny \"cnn\"\n", ["compute", "h2d"]).unwrap();
        let args = [("kind", Value::Text("aten::mm")), ("bytes", Value::Number(512))];
        writer
            .span(
                compute,
                &Span { name: "mm\\0", start: Nanos(1_234_567), duration: Nanos(5), args: &args },
            )
            .unwrap();
        writer
            .span(h2d, &Span { name: "w", start: Nanos(0), duration: Nanos(1_000), args: &[] })
            .unwrap();
        writer.counter(job, "memory", Nanos(7), &[("resident", 1024), ("budget", 2048)]).unwrap();
        let text = String::from_utf8(writer.finish().unwrap()).unwrap();
        let want = r#"{"displayTimeUnit":"ns","traceEvents":[
{"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"tiny \"cnn\"\n"}},
{"ph":"M","pid":1,"tid":0,"name":"process_sort_index","args":{"sort_index":1}},
{"ph":"M","pid":1,"tid":1,"name":"thread_name","args":{"name":"compute"}},
{"ph":"M","pid":1,"tid":1,"name":"thread_sort_index","args":{"sort_index":1}},
{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"h2d"}},
{"ph":"M","pid":1,"tid":2,"name":"thread_sort_index","args":{"sort_index":2}},
{"ph":"X","pid":1,"tid":1,"name":"mm\\0","ts":1234.567,"dur":0.005,"args":{"kind":"aten::mm","bytes":512}},
{"ph":"X","pid":1,"tid":2,"name":"w","ts":0.000,"dur":1.000},
{"ph":"C","pid":1,"tid":0,"name":"memory","ts":0.007,"args":{"resident":1024,"budget":2048}}
]}
"#;
        assert_eq!(text, want);
        serde_json::from_str::<serde_json::Value>(&text).unwrap();
    }

    #[test]
    fn an_empty_timeline_is_json_too() {
        let empty = Writer::new(Vec::new()).unwrap().finish().unwrap();
        assert!(
            serde_json::from_slice::<serde_json::Value>(&empty).unwrap()["traceEvents"]
                .as_array()
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let mut buffer = [0u8; 40];
        let ended =
            Writer::new(&mut buffer[..]).and_then(|mut w| w.process("p", ["compute"]).map(|_| ()));
        assert!(ended.is_err());
    }
}
