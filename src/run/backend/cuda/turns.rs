//! A job's stretches in the window that it shares with other jobs ([`crate::sim::window`]).
//!
//! An item of a stretch is put on its stream only when the job holds the window. The window is
//! passed on by a call of the driver behind the last items of the stretch, so the device need not
//! be idle for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::driver::{Context, Event, Fault, Queue};
use crate::backend::Script;
use crate::backend::window::{Left, Member, Windows};
use crate::units::{Nanos, saturated};

/// The windows of a job's lane, and where the job is.
pub struct Turns {
    windows: Arc<Windows>,
    member: Member,
    /// The stretch that was begun last.
    held: Option<(usize, Arc<Progress>)>,
    /// When each stretch was begun, and by which item.
    begun: Vec<(Event, Option<usize>)>,
    waited: Nanos,
}

/// How much of a stretch the device has executed.
#[derive(Default)]
struct Progress {
    /// How many of its last items have not ended.
    left: AtomicUsize,
    /// The window was passed on.
    over: AtomicBool,
}

impl Turns {
    /// # Errors
    /// When the driver gives no events.
    pub fn new(
        (windows, member): (Arc<Windows>, Member),
        script: &Script,
        context: &Context,
    ) -> Result<Self, Fault> {
        let begun = script.stretches.iter().map(|_| Ok((context.event(true)?, None)));
        let begun = begun.collect::<Result<_, Fault>>()?;
        Ok(Self { windows, member, held: None, begun, waited: Nanos::ZERO })
    }

    /// An iteration begins.
    pub fn begin(&mut self) {
        (self.held, self.waited) = (None, Nanos::ZERO);
        self.begun.iter_mut().for_each(|(_, item)| *item = None);
    }

    /// How long this iteration has waited for the window so far.
    pub const fn waited(&self) -> Nanos {
        self.waited
    }

    /// An item is about to be put on its stream: waits until its stretch may begin.
    ///
    /// # Errors
    /// When the driver has failed.
    pub fn before(
        &mut self,
        script: &Script,
        item: usize,
        queues: &[Queue; 3],
    ) -> Result<(), Fault> {
        let Some(stretch) = script.items[item].stretch else { return Ok(()) };
        if self.held.as_ref().is_some_and(|held| held.0 == stretch) {
            return Ok(());
        }
        if self.held.take().is_some_and(|(_, progress)| !progress.over.load(Ordering::Acquire)) {
            // Until the stretch before has let go of the window.
            queues.iter().try_for_each(Queue::wait_for_all)?;
        }
        let waited = self.windows.wait(self.member, &AtomicBool::new(false)).unwrap_or_default();
        self.waited += Nanos(saturated(waited.as_nanos()));
        let left = AtomicUsize::new(script.stretches[stretch].len());
        self.held = Some((stretch, Arc::new(Progress { left, ..Progress::default() })));
        let (event, by) = &mut self.begun[stretch];
        *by = Some(item);
        queues[script.items[item].stream.index()].record(event)
    }

    /// An item is on its stream: if its stretch is over with it, the window is passed on then.
    ///
    /// # Errors
    /// When the driver has failed.
    pub fn behind(&self, script: &Script, item: usize, queues: &[Queue; 3]) -> Result<(), Fault> {
        let Some((stretch, progress)) = &self.held else { return Ok(()) };
        if !script.stretches[*stretch].contains(&item) {
            return Ok(());
        }
        let (windows, progress) = (Arc::clone(&self.windows), Arc::clone(progress));
        let member = self.member;
        queues[script.items[item].stream.index()].then(Box::new(move || {
            if progress.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                windows.let_go(member);
                progress.over.store(true, Ordering::Release);
            }
        }))
    }

    /// When the stretch of an item was begun, if it is the item that began it.
    ///
    /// # Errors
    /// When the driver does not tell.
    pub fn begun_by(&self, script: &Script, item: usize, base: &Event) -> Result<Nanos, Fault> {
        let begun = script.items[item].stretch.map(|stretch| &self.begun[stretch]);
        match begun.filter(|(_, by)| *by == Some(item)) {
            Some((event, _)) => base.until(event).map(Nanos),
            None => Ok(Nanos::ZERO),
        }
    }
}

/// Lets go of the window of a job that ends, even if it failed while it held it.
#[must_use]
pub fn left(window: Option<&(Arc<Windows>, Member)>) -> Left<'_> {
    Left(window.map(|(windows, member)| (&**windows, *member)))
}
