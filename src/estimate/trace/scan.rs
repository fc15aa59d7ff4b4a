//! Finds where JSON strings, numbers and nested values end, in bytes that may stop anywhere.
//!
//! This is the trace reader's inner loop. It accepts anything inside strings (control characters,
//! line ends, invalid UTF-8) and is strict about structure. It decodes no values and builds no
//! tree.

/// Why scanning stopped before the end of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The bytes ran out.
    More,
    /// The byte at this position is not allowed there.
    Bad(usize),
}

/// The deepest nesting of a value.
pub(super) const DEPTH: u32 = 128;

/// A position in some bytes.
pub(super) struct Cursor<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

const PLAIN: u8 = 0;
const QUOTE: u8 = 1;
const OPEN: u8 = 2;
const CLOSE: u8 = 3;

/// The meaning of each byte inside a nested value.
const NESTED: [u8; 256] = {
    let mut class = [PLAIN; 256];
    class[b'"' as usize] = QUOTE;
    class[b'[' as usize] = OPEN;
    class[b'{' as usize] = OPEN;
    class[b']' as usize] = CLOSE;
    class[b'}' as usize] = CLOSE;
    class
};

impl<'a> Cursor<'a> {
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The next byte that is not white space; the cursor stays on it.
    pub fn token(&mut self) -> Result<u8, Stop> {
        while let Some(&byte) = self.bytes.get(self.at) {
            if byte > b' ' {
                return Ok(byte);
            }
            self.at += 1;
        }
        Err(Stop::More)
    }

    /// Steps over `byte`, which must be the next token.
    pub fn expect(&mut self, byte: u8) -> Result<(), Stop> {
        if self.token()? != byte {
            return Err(Stop::Bad(self.at));
        }
        self.at += 1;
        Ok(())
    }

    /// A string's content with its escapes; the cursor is on its first quote.
    pub fn string(&mut self) -> Result<&'a [u8], Stop> {
        let from = self.at + 1;
        let to = string_end(self.bytes, from).ok_or(Stop::More)?;
        self.at = to + 1;
        Ok(&self.bytes[from..to])
    }

    /// A string's content, or a number or word. A nested value is skipped and gives nothing.
    pub fn plain(&mut self) -> Result<&'a [u8], Stop> {
        match self.token()? {
            b'"' => self.string(),
            b'[' | b'{' => self.nested(0, 0).map(|()| &[][..]),
            _ => self.word(),
        }
    }

    /// Any value's text as it stands.
    pub fn value(&mut self) -> Result<&'a [u8], Stop> {
        let first = self.token()?;
        let from = self.at;
        match first {
            b'"' => drop(self.string()?),
            b'[' | b'{' => self.nested(0, 0)?,
            _ => drop(self.word()?),
        }
        Ok(&self.bytes[from..self.at])
    }

    /// A number, `true`, `null`, `NaN`: everything up to the next delimiter.
    fn word(&mut self) -> Result<&'a [u8], Stop> {
        let from = self.at;
        while let Some(&byte) = self.bytes.get(self.at) {
            if byte <= b' ' || matches!(byte, b',' | b'}' | b']') {
                return if self.at == from {
                    Err(Stop::Bad(from))
                } else {
                    Ok(&self.bytes[from..self.at])
                };
            }
            if matches!(byte, b'"' | b'{' | b'[' | b':') {
                return Err(Stop::Bad(self.at));
            }
            self.at += 1;
        }
        Err(Stop::More)
    }

    /// Skips the rest of an object; the cursor is inside it.
    pub fn rest_of_object(&mut self) -> Result<(), Stop> {
        self.nested(1, 1)
    }

    /// Skips until `depth` brackets are closed. The low bits of `braces` say which of them are
    /// braces.
    fn nested(&mut self, mut depth: u32, mut braces: u128) -> Result<(), Stop> {
        while let Some(&byte) = self.bytes.get(self.at) {
            match NESTED[byte as usize] {
                PLAIN => self.at += 1,
                QUOTE => self.at = string_end(self.bytes, self.at + 1).ok_or(Stop::More)? + 1,
                OPEN => {
                    if depth == DEPTH {
                        return Err(Stop::Bad(self.at));
                    }
                    depth += 1;
                    braces = braces << 1 | u128::from(byte == b'{');
                    self.at += 1;
                }
                _ => {
                    if (braces & 1 == 1) != (byte == b'}') {
                        return Err(Stop::Bad(self.at));
                    }
                    depth -= 1;
                    braces >>= 1;
                    self.at += 1;
                    if depth == 0 {
                        return Ok(());
                    }
                }
            }
        }
        Err(Stop::More)
    }
}

/// The position of the quote that ends the string whose inside begins at `at`.
fn string_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        // Eight bytes at once: a byte equal to the one sought becomes zero, whose top bit the
        // subtraction sets. The lowest such bit is always right, and only that one is used.
        const LOW: u64 = 0x0101_0101_0101_0101;
        while let Some(eight) = bytes.get(at..).and_then(<[u8]>::first_chunk::<8>) {
            let word = u64::from_le_bytes(*eight);
            let (quote, slash) = (word ^ (LOW * b'"' as u64), word ^ (LOW * b'\\' as u64));
            let found =
                (quote.wrapping_sub(LOW) & !quote | slash.wrapping_sub(LOW) & !slash) & (LOW << 7);
            if found != 0 {
                at += found.trailing_zeros() as usize / 8;
                break;
            }
            at += 8;
        }
        match bytes.get(at)? {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<&str, Stop> {
        Cursor::new(text.as_bytes()).value().map(|v| std::str::from_utf8(v).unwrap())
    }

    #[test]
    fn values_end_where_they_end() {
        assert_eq!(
            value(r#" [[1, 2], ["]", {"a": "\\"}]], 7"#),
            Ok(r#"[[1, 2], ["]", {"a": "\\"}]]"#)
        );
        assert_eq!(
            value(r#""a long string with \" in it", 7"#),
            Ok(r#""a long string with \" in it""#)
        );
        assert_eq!(value("-12.5e3\n}"), Ok("-12.5e3"));
        assert_eq!(value("12"), Err(Stop::More));
        assert_eq!(value(r#""ends in an escape\"#), Err(Stop::More));
        assert_eq!(value("[1, {2]"), Err(Stop::Bad(6)));
        assert_eq!(value("1:2,"), Err(Stop::Bad(1)));
        let deep = "[".repeat(DEPTH as usize + 1);
        assert_eq!(value(&deep), Err(Stop::Bad(DEPTH as usize)));
    }

    #[test]
    fn a_string_ends_at_any_alignment() {
        for before in 0..20 {
            for after in 0..20 {
                let text = format!(
                    "\"{}\\\"{}\u{1}é\"{}",
                    "x".repeat(before),
                    "y".repeat(after),
                    "z\"".repeat(after)
                );
                let inside = Cursor::new(text.as_bytes()).string().unwrap();
                assert_eq!(inside.len(), before + 2 + after + 3, "{text}");
            }
        }
    }
}
