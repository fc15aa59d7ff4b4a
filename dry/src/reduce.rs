//! Reductions over the ranks' operands, for the element types that small control messages have.

use std::ffi::c_int;

/// An element type of NCCL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F32,
    F64,
    /// Half precision and bfloat16: exchanged, and reduced only where all but one are 0.
    Half,
    /// Eight-bit floats, likewise.
    Quarter,
}

impl Kind {
    /// From `ncclDataType_t`.
    pub fn from_nccl(kind: c_int) -> Self {
        match kind {
            0 => Kind::I8,
            1 => Kind::U8,
            2 => Kind::I32,
            3 => Kind::U32,
            4 => Kind::I64,
            5 => Kind::U64,
            7 => Kind::F32,
            8 => Kind::F64,
            6 | 9 => Kind::Half,
            _ => Kind::Quarter,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Kind::I8 | Kind::U8 | Kind::Quarter => 1,
            Kind::Half => 2,
            Kind::I32 | Kind::U32 | Kind::F32 => 4,
            Kind::I64 | Kind::U64 | Kind::F64 => 8,
        }
    }
}

/// Reduces element by element: 0 sum, 1 product, 2 maximum, 3 minimum, 4 average.
pub fn all(kind: Kind, operation: c_int, mut operands: Vec<Vec<u8>>) -> Vec<u8> {
    let ranks = operands.len();
    let mut sum = operands.swap_remove(0);
    macro_rules! with {
        ($t:ty, $add:expr, $multiply:expr) => {
            for other in &operands {
                each(&mut sum, other, |a: [u8; size_of::<$t>()], b| {
                    let (a, b) = (<$t>::from_le_bytes(a), <$t>::from_le_bytes(b));
                    let c = match operation {
                        1 => $multiply(a, b),
                        2 => {
                            if b > a {
                                b
                            } else {
                                a
                            }
                        }
                        3 => {
                            if b < a {
                                b
                            } else {
                                a
                            }
                        }
                        _ => $add(a, b),
                    };
                    c.to_le_bytes()
                });
            }
            if operation == 4 {
                each(&mut sum, &[], |a: [u8; size_of::<$t>()], _| {
                    (<$t>::from_le_bytes(a) / ranks as $t).to_le_bytes()
                });
            }
        };
    }
    match kind {
        Kind::I8 => {
            with!(i8, i8::wrapping_add, i8::wrapping_mul);
        }
        Kind::U8 => {
            with!(u8, u8::wrapping_add, u8::wrapping_mul);
        }
        Kind::I32 => {
            with!(i32, i32::wrapping_add, i32::wrapping_mul);
        }
        Kind::U32 => {
            with!(u32, u32::wrapping_add, u32::wrapping_mul);
        }
        Kind::I64 => {
            with!(i64, i64::wrapping_add, i64::wrapping_mul);
        }
        Kind::U64 => {
            with!(u64, u64::wrapping_add, u64::wrapping_mul);
        }
        Kind::F32 => {
            with!(f32, |a: f32, b: f32| a + b, |a: f32, b: f32| a * b);
        }
        Kind::F64 => {
            with!(f64, |a: f64, b: f64| a + b, |a: f64, b: f64| a * b);
        }
        Kind::Half | Kind::Quarter => {
            for other in &operands {
                for (a, b) in sum.iter_mut().zip(other) {
                    *a |= b;
                }
            }
        }
    }
    sum
}

/// Applies `f` to each element of `to` and the one at its place in `from` (zeros beyond its end).
fn each<const N: usize>(to: &mut [u8], from: &[u8], f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (i, chunk) in to.chunks_exact_mut(N).enumerate() {
        let mut a = [0; N];
        a.copy_from_slice(chunk);
        let mut b = [0; N];
        if let Some(other) = from.get(i * N..(i + 1) * N) {
            b.copy_from_slice(other);
        }
        chunk.copy_from_slice(&f(a, b));
    }
}
