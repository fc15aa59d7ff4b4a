//! Random numbers from a counter: the same operator, iteration and element give the same number, so
//! recomputing and going backward repeat what going forward drew.
//!
//! Philox-4x32-10 (Salmon et al., SC 2011) with key = the operator's random key and counter =
//! (element / 4, iteration); element i takes word i mod 4.

/// The key and the iteration.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    /// Which operator draws.
    pub key: u64,
    /// In which iteration.
    pub iteration: u64,
}

/// One Philox-4x32-10 block.
#[must_use]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let p = u64::from(a) * 0xD251_1F53;
        let q = u64::from(c) * 0xCD9E_8D57;
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k0, q as u32, (p >> 32) as u32 ^ d ^ k1, p as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [a, b, c, d]
}

impl Random {
    /// Sets `keep[i]` to whether element `first + i` survives dropout with probability `p` of being
    /// dropped.
    pub fn keep(self, p: f64, first: u64, keep: &mut [bool]) {
        let threshold = threshold(p);
        let (mut words, mut block) = ([0; 4], u64::MAX);
        for (element, slot) in (first..).zip(keep) {
            if element / 4 != block {
                block = element / 4;
                words = self.block(block);
            }
            *slot = u64::from(words[(element % 4) as usize]) >= threshold;
        }
    }

    /// The four words of elements `4 * block..4 * block + 4`.
    fn block(self, block: u64) -> [u32; 4] {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let ([low, high], [iteration, more]) = (halves(block), halves(self.iteration));
        philox([low, high, iteration, more], halves(self.key))
    }

    /// The word of one element.
    #[must_use]
    pub fn word(self, element: u64) -> u32 {
        self.block(element / 4)[(element % 4) as usize]
    }
}

/// The words of 2^32 below which an element is dropped: u / 2^32 < p in whole numbers.
#[must_use]
pub fn threshold(p: f64) -> u64 {
    (p.clamp(0.0, 1.0) * 4_294_967_296.0).ceil() as u64
}

/// The factor that kept elements grow by, from a dropped share.
#[must_use]
pub fn survivors(p: f64) -> f32 {
    if p >= 1.0 { 0.0 } else { (1.0 / (1.0 - p)) as f32 }
}

/// The factor in full precision where `scale` is what a trace keeps of one over a round share: six
/// decimals.
#[must_use]
pub fn unrounded(scale: f64) -> f32 {
    if scale <= 1.0 {
        return scale as f32;
    }
    let share = ((1.0 - 1.0 / scale) * 1e4).round() / 1e4;
    let exact = 1.0 / (1.0 - share);
    if (exact - scale).abs() < 6e-7 { exact as f32 } else { scale as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (kat_vectors).
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn keeps_the_right_share_and_is_independent_of_where_it_starts() {
        let random = Random { key: 3, iteration: 9 };
        let mut all = vec![false; 40_000];
        random.keep(0.1, 0, &mut all);
        let kept = all.iter().filter(|k| **k).count();
        assert!((35_700..36_300).contains(&kept), "{kept}");
        let mut part = vec![false; 100];
        random.keep(0.1, 1001, &mut part);
        assert_eq!(part, all[1001..1101]);
        Random { key: 3, iteration: 10 }.keep(0.1, 1001, &mut part);
        assert_ne!(part, all[1001..1101]);
    }

    #[test]
    fn rounded_factors_are_recovered() {
        assert_eq!(unrounded(1.111_111), (1.0f64 / 0.9) as f32);
        assert_eq!(unrounded(2.0), 2.0);
        assert_eq!(unrounded(1.234_567_9), 1.234_567_9);
    }
}
