//! Events at the ends of items and of streams.

use super::driver::{Context, Event, Fault, Queue};
use crate::backend::Script;
use crate::units::Nanos;

/// The events of a script's items and streams.
pub struct Ends {
    /// Of each item; they keep the time.
    pub items: Vec<Event>,
    /// Of each item for which another stream waits; they keep no time, which costs less.
    marks: Vec<Option<Event>>,
    /// Of each stream's last item, in every other iteration: those of the iteration before tell
    /// how long the device then stood still.
    streams: [[Event; 3]; 2],
    /// The end of the iteration before: the set, and the stream that ended last.
    before: Option<(usize, usize)>,
}

impl Ends {
    /// # Errors
    /// When the driver gives no events.
    pub fn new(script: &Script, context: &Context) -> Result<Self, Fault> {
        let mut awaited = vec![false; script.items.len()];
        script.items.iter().flat_map(|item| &item.waits).for_each(|&wait| awaited[wait] = true);
        let mark = |&awaited: &bool| awaited.then(|| context.event(false)).transpose();
        let set = || Ok([context.event(true)?, context.event(true)?, context.event(true)?]);
        Ok(Self {
            items: script.items.iter().map(|_| context.event(true)).collect::<Result<_, _>>()?,
            marks: awaited.iter().map(mark).collect::<Result<_, _>>()?,
            streams: [set()?, set()?],
            before: None,
        })
    }

    /// The event that an item records: one in each iteration that is timed, otherwise one if it is
    /// waited for.
    pub fn event(&self, item: usize, timed: bool) -> Option<&Event> {
        if timed { self.items.get(item) } else { self.marks.get(item)?.as_ref() }
    }

    /// The set of this iteration.
    fn set(&self) -> usize {
        self.before.map_or(0, |(set, _)| 1 - set)
    }

    /// All items of an iteration are on their streams.
    ///
    /// # Errors
    /// When the driver has failed.
    pub fn record(&self, script: &Script, queues: &[Queue; 3]) -> Result<(), Fault> {
        let all = queues.iter().zip(&self.streams[self.set()]).zip(&script.streams);
        let mut used = all.filter(|(_, items)| !items.is_empty());
        used.try_for_each(|((queue, event), _)| queue.record(event))
    }

    /// All items of the iteration that began at `base` have ended. Returns how long the device had
    /// stood still before it, and how long it took.
    ///
    /// # Errors
    /// When something has not ended.
    pub fn passed(&mut self, script: &Script, base: &Event) -> Result<(Nanos, Nanos), Fault> {
        let gap = self.before.map(|(set, stream)| self.streams[set][stream].until(base));
        let set = self.set();
        let (mut took, mut last) = (0, None);
        for (stream, event) in self.streams[set].iter().enumerate() {
            if !script.streams[stream].is_empty() {
                let end = base.until(event)?;
                if last.is_none() || end > took {
                    (took, last) = (end, Some((set, stream)));
                }
            }
        }
        self.before = last;
        Ok((Nanos(gap.transpose()?.unwrap_or(0)), Nanos(took)))
    }
}
