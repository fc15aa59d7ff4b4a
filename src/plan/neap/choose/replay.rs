//! Choices that are made again.

use super::lane::Window;
use super::{Choice, Chooser, Made, Setting, streamable};
use crate::residency::{Gap, Swap};
use crate::sim::program::Direction;
use crate::units::TensorId;

impl Chooser<'_, '_> {
    /// Makes choices again that were made before, as far as they are still open.
    pub fn replay(&mut self, choices: &[Choice]) {
        let Setting { options, variant, .. } = self.setting;
        if variant.streamed > 0 {
            self.streamable = streamable(&self.residencies, options.min_swap.0, variant.parameters);
        }
        for &choice in choices {
            let tensor = choice.tensor;
            let Some(gap) = choice.gap(&self.residencies) else { continue };
            match choice.made {
                Made::Swapped(swap) => {
                    let open = self.residencies.gap(tensor, gap) != Gap::Recompute;
                    if open && self.may_swap(tensor, gap) {
                        let swap = choice.swap(&self.residencies, gap, swap);
                        self.take_times(tensor, gap, swap, choice.windows);
                        self.swap(tensor, gap, swap, choice.windows);
                    }
                }
                Made::Again(limit) => {
                    if !choice.open(&self.residencies, gap) {
                        continue;
                    }
                    let reach = options.reach();
                    let latencies = self.setting.latencies;
                    if let Some(recompute) =
                        self.residencies.recompute_of(latencies, tensor, gap, reach)
                    {
                        self.choices.push(choice);
                        self.residencies.apply(tensor, gap, recompute, limit, reach);
                    }
                }
            }
        }
    }

    /// The link's time for a swap, near the instants at which it is meant to be.
    fn take_times(
        &mut self,
        tensor: TensorId,
        gap: usize,
        swap: Swap,
        windows: Option<[Window; 2]>,
    ) {
        let clock = self.setting.clock;
        let bytes = self.residencies.graph.tensor(tensor).bytes;
        let (_, b, _) = self.residencies.ends(tensor, gap);
        let windows = windows.filter(|_| self.setting.variant.shift);
        if !self.residencies.clean(tensor, gap) {
            let time = self.length(Direction::D2h, bytes, false);
            let at = (swap.starts.0, time);
            let window = (clock.place(swap.out_place), clock.total);
            if let Some([window, _]) = windows
                && self.out.is_free(window, at)
            {
                self.out.book((tensor, b), window, at);
            } else if let Some(out) = self.out.free(window, time) {
                self.out.take(out, time);
            }
        }
        let time = self.length(Direction::H2d, bytes, false);
        let at = (swap.starts.1, time);
        if let Some([_, window]) = windows
            && self.back.is_free(window, at)
        {
            self.back.book((tensor, b), window, at);
        } else if let Some(back) = self.back.free((0, clock.slot(b)), time) {
            self.back.take(back, time);
        }
    }
}
