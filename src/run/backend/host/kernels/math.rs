//! Single-precision functions without branches, so that loops over them vectorise.
//!
//! Coefficients are Cephes' (S. Moshier); errors are within about two units in the last place.

/// e to the `x`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.7);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    // Two factors, since 2^128 has no place in the format.
    let whole = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = whole >> 1;
    let rest = whole.wrapping_sub(half);
    let power = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    let y = p * power(half) * power(rest);
    let y = if x < -87.3 { 0.0 } else { y };
    let y = if x > 88.722_83 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut p = -5.704_988_7e-3;
    p = p * z + 2.063_909e-2;
    p = p * z - 5.373_971_5e-2;
    p = p * z + 1.333_144_2e-1;
    p = p * z - 3.333_328e-1;
    let small = p * z * x + x;
    let large = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { small } else { large }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The error function.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let a = x.abs();
    let z = a * a;
    let poly = |coefficients: &[f32], at: f32| coefficients.iter().fold(0.0, |sum, c| sum * at + c);
    let small = a * poly(
        &[
            7.853_861_4e-5,
            -8.010_193_6e-4,
            5.188_327_7e-3,
            -2.685_381_2e-2,
            1.128_358_5e-1,
            -3.761_262_6e-1,
            std::f32::consts::FRAC_2_SQRT_PI,
        ],
        z,
    );
    let q = 1.0 / a.max(1.0);
    let y = q * q;
    let near = poly(
        &[
            2.326_82e-2,
            -1.387_039_4e-1,
            3.687_424_7e-1,
            -5.824_733e-1,
            6.210_004_6e-1,
            -4.944_515_3e-1,
            3.404_88e-1,
            -2.741_127e-1,
            5.638_259_4e-1,
        ],
        y,
    );
    let far = poly(
        &[
            -10.477_664,
            12.977_2,
            -7.495_518_7,
            2.921_019,
            -1.015_265_3,
            4.218_463_4e-1,
            -2.820_767_4e-1,
            5.641_895e-1,
        ],
        y,
    );
    let large = 1.0 - exp(-z) * q * if a > 2.0 { far } else { near };
    let large = if a > 6.0 { 1.0 } else { large };
    (if a < 1.0 { small } else { large }).copysign(x)
}
