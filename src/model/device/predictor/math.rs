//! Logarithm and exponential computed with additions, multiplications and divisions only.
//!
//! Maths libraries may differ in the last bit from machine to machine. These functions do not, so a
//! trained predictor and its predictions are the same on every machine.

/// ln 2, to the nearest double.
const LN_2: f64 = std::f64::consts::LN_2;

/// The natural logarithm of a positive normal number, to about 1e-15; 0 for anything else.
#[must_use]
pub fn ln(x: f64) -> f64 {
    if !(x.is_normal() && x > 0.0) {
        return 0.0;
    }
    let bits = x.to_bits();
    let mut exponent = f64::from(u16::try_from(bits >> 52).unwrap_or(0)) - 1023.0;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1.0;
    }
    // ln m = 2 · artanh((m - 1) / (m + 1)), and |s| stays below 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for odd in (0..12).rev() {
        sum = sum * square + 1.0 / f64::from(2 * odd + 1);
    }
    exponent * LN_2 + 2.0 * s * sum
}

/// e to the power of `x`, to about 1e-15. `x` is clamped to ±700; NaN counts as 0.
#[must_use]
pub fn exp(x: f64) -> f64 {
    let x = if x.is_nan() { 0.0 } else { x.clamp(-700.0, 700.0) };
    let halvings = (x / LN_2).round();
    let rest = x - halvings * LN_2;
    let mut sum = 1.0;
    for n in (1..18).rev() {
        sum = sum * rest / f64::from(n) + 1.0;
    }
    #[expect(clippy::cast_possible_truncation, reason = "between -1010 and 1010")]
    let exponent = 1023 + halvings as i64;
    sum * f64::from_bits(u64::try_from(exponent).unwrap_or(1023) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_librarys() {
        for i in 1..4000 {
            let x = f64::from(i) * 0.37;
            assert!((ln(x) - x.ln()).abs() <= 1e-14 * x.ln().abs().max(1.0), "{x}");
            let y = f64::from(i - 2000) * 0.05;
            assert!((exp(y) / y.exp() - 1.0).abs() < 1e-13, "{y}");
            assert!((exp(ln(x)) / x - 1.0).abs() < 1e-13, "{x}");
        }
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY, 5e-324] {
            assert_eq!(ln(odd), 0.0);
        }
        assert!(exp(1e9).is_finite() && exp(-1e9) > 0.0 && exp(f64::NAN) == 1.0);
    }
}
