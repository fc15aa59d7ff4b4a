//! bf16 and f16, and how f32 is rounded to them: to the nearest, ties to even, as PyTorch does.

/// bf16 as f32, exactly.
#[inline]
#[must_use]
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f32 rounded to bf16.
#[inline]
#[must_use]
pub fn to_bf16(x: f32) -> u16 {
    if x.is_nan() {
        return 0x7fc0;
    }
    let bits = x.to_bits();
    // Half of the last place, and one more where the kept part is odd.
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// f16 as f32, exactly.
#[inline]
#[must_use]
pub fn from_f16(bits: u16) -> f32 {
    let (sign, exponent, fraction) =
        (u32::from(bits >> 15) << 31, u32::from(bits >> 10) & 31, u32::from(bits) & 1023);
    let size = match exponent {
        // Subnormal: a whole number of 2^-24.
        0 => (fraction as f32 / 16_777_216.0).to_bits(),
        31 => 0x7f80_0000 | fraction << 13,
        // From a bias of 15 to one of 127.
        _ => (exponent + 112) << 23 | fraction << 13,
    };
    f32::from_bits(sign | size)
}

/// f32 rounded to f16; what is too large becomes infinite.
#[inline]
#[must_use]
pub fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, size) = ((bits >> 16) as u16 & 0x8000, bits & 0x7fff_ffff);
    let magnitude = if size > 0x7f80_0000 {
        0x7e00
    } else if size >= 0x477f_f000 {
        // From halfway between the largest number and the next power of two.
        0x7c00
    } else if size < 0x3880_0000 {
        // Below 2^-14: adding 0.5 leaves a whole number of 2^-24 in the last places, rounded.
        (f32::from_bits(size) + 0.5).to_bits() - 0x3f00_0000
    } else {
        (size - 0x3800_0000 + 0xfff + ((size >> 13) & 1)) >> 13
    };
    sign | magnitude as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_way_through_f32() {
        for bits in 0..=u16::MAX {
            let nan = from_f16(bits).is_nan();
            assert!(
                nan && from_f16(to_f16(from_f16(bits))).is_nan() || to_f16(from_f16(bits)) == bits
            );
            let nan = from_bf16(bits).is_nan();
            assert!(nan && to_bf16(from_bf16(bits)) == 0x7fc0 || to_bf16(from_bf16(bits)) == bits);
        }
    }

    #[test]
    fn ties_go_to_even() {
        // Between 1 and the next number, and between that and the one after it.
        assert_eq!(to_f16(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(to_f16(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(to_bf16(1.0 + 1.0 / 256.0), 0x3f80);
        assert_eq!(to_bf16(1.0 + 3.0 / 256.0), 0x3f82);
        // Subnormal: 2.5 and 3.5 of 2^-24, and half of it.
        let least = 2f32.powi(-24);
        assert_eq!([2.5, 3.5, 0.5, 0.75].map(|x| to_f16(x * least)), [2, 4, 0, 1]);
        // 65504 is the largest; 65520 lies halfway to 65536.
        assert_eq!([65519.0, 65520.0].map(to_f16), [0x7bff, 0x7c00]);
        assert_eq!(to_bf16(f32::MAX), 0x7f80);
    }
}
