//! Parses numbers of a trace exactly: microseconds to nanoseconds, addresses, byte counts. A text
//! that is not such a number gives `None`.

/// Parses microseconds, with any number of decimals or an exponent, as nanoseconds. More than three
/// decimals are rounded.
pub(super) fn nanos(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, text),
    };
    let (mut mantissa, mut significant, mut scale, mut seen, mut fraction) =
        (0u64, 0u32, 3i32, false, false);
    let mut exponent = None;
    for (i, &byte) in digits.iter().enumerate() {
        match byte {
            b'0'..=b'9' => {
                seen = true;
                // 19 digits always fit. Further digits are far below a nanosecond, or the number is
                // too large.
                if significant < 19 {
                    mantissa = mantissa * 10 + u64::from(byte - b'0');
                    significant += u32::from(mantissa != 0);
                    scale -= i32::from(fraction);
                } else {
                    scale = scale.saturating_add(i32::from(!fraction));
                }
            }
            b'.' if !fraction => fraction = true,
            b'e' | b'E' if seen => {
                exponent = Some(&digits[i + 1..]);
                break;
            }
            _ => return None,
        }
    }
    if !seen {
        return None;
    }
    if let Some(text) = exponent {
        scale = scale.saturating_add(std::str::from_utf8(text).ok()?.parse().ok()?);
    }
    let value = if scale == 0 || mantissa == 0 {
        i128::from(mantissa)
    } else if scale > 0 {
        i128::from(mantissa)
            * 10i128.checked_pow(u32::try_from(scale).ok()?).filter(|p| *p <= 1 << 63)?
    } else {
        match 10i128.checked_pow(scale.unsigned_abs()) {
            Some(divisor) => (i128::from(mantissa) + divisor / 2) / divisor,
            None => 0,
        }
    };
    i64::try_from(if negative { -value } else { value }).ok()
}

/// A whole number.
pub(super) fn whole(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Parses an address: decimal, hexadecimal with `0x`, or negative if a tool wrote it as signed.
pub(super) fn address(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok().or_else(|| text.parse::<i64>().ok().map(i64::cast_unsigned)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_become_exact_nanoseconds() {
        for (text, ns) in [
            ("4360612443239.315", Some(4_360_612_443_239_315)),
            ("1790857026000000.123", Some(1_790_857_026_000_000_123)),
            ("1790857026000000.1234567", Some(1_790_857_026_000_000_123)),
            ("0", Some(0)),
            ("7", Some(7_000)),
            ("7.", Some(7_000)),
            ("-0.25", Some(-250)),
            ("0.0004", Some(0)),
            ("0.0005", Some(1)),
            ("123.4560001", Some(123_456)),
            ("1.5e3", Some(1_500_000)),
            ("1E-3", Some(1)),
            ("1e-400", Some(0)),
            ("00000000000000000000000012", Some(12_000)),
            ("0e999999999", Some(0)),
            ("9223372036854775.807", Some(i64::MAX)),
            ("9223372036854775.808", None),
            ("99999999999999999999999999", None),
            ("1e400", None),
            ("1e99999999999", None),
            ("NaN", None),
            ("-Infinity", None),
            ("", None),
            ("-", None),
            (".", None),
            ("1.2.3", None),
            ("e5", None),
        ] {
            assert_eq!(nanos(text.as_bytes()), ns, "{text}");
        }
    }

    #[test]
    fn addresses() {
        assert_eq!(address(b"140387366289472"), Some(140_387_366_289_472));
        assert_eq!(address(b"0x7fff0000"), Some(0x7fff_0000));
        assert_eq!(address(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(address(b"-1"), Some(u64::MAX));
        assert_eq!(address(b"here"), None);
    }
}
