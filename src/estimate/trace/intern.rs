//! Keeps each text and each argument list once, numbered in order of first appearance: the million
//! events of a trace share a few thousand texts.

use neap_model::units::id32;
use std::borrow::Cow;
use std::hash::{BuildHasher, RandomState};

/// A table of texts, and the memory that it uses.
#[derive(Default)]
pub(super) struct Interner {
    pub texts: Vec<Box<str>>,
    /// Open addressing over a power of two of slots: the upper half of the hash, and the id plus
    /// one; 0 is a free slot.
    slots: Vec<(u32, u32)>,
    // A random seed, so that no file can force collisions. The ids don't depend on it.
    hasher: RandomState,
    pub bytes: u64,
}

impl Interner {
    /// The id of `raw`. Invalid UTF-8 is replaced.
    pub fn id(&mut self, raw: &[u8]) -> u32 {
        let hash = self.hasher.hash_one(raw);
        match self.find(raw, hash) {
            Ok(id) => id,
            Err(slot) => match String::from_utf8_lossy(raw) {
                Cow::Borrowed(text) => self.insert(slot, hash, text.into()),
                Cow::Owned(text) => self.id(text.as_bytes()),
            },
        }
    }

    /// The id, or the free slot for it.
    fn find(&mut self, raw: &[u8], hash: u64) -> Result<u32, usize> {
        if self.slots.len() <= self.texts.len() * 2 {
            self.grow();
        }
        let mask = self.slots.len() - 1;
        let mut slot = low(hash) & mask;
        loop {
            match self.slots[slot] {
                (_, 0) => return Err(slot),
                (upper, id)
                    if upper == (hash >> 32) as u32
                        && self.texts[id as usize - 1].as_bytes() == raw =>
                {
                    return Ok(id - 1);
                }
                _ => slot = (slot + 1) & mask,
            }
        }
    }

    fn insert(&mut self, slot: usize, hash: u64, text: Box<str>) -> u32 {
        // The slots and the table's entry while both double, and the allocator's overhead.
        self.bytes += text.len() as u64 + 128;
        let id = id32(self.texts.len());
        self.texts.push(text);
        self.slots[slot] = ((hash >> 32) as u32, id + 1);
        id
    }

    fn grow(&mut self) {
        let size = (self.slots.len() * 2).max(64);
        self.slots = vec![(0, 0); size];
        for (id, text) in self.texts.iter().enumerate() {
            let hash = self.hasher.hash_one(text.as_bytes());
            let mut slot = low(hash) & (size - 1);
            while self.slots[slot].1 != 0 {
                slot = (slot + 1) & (size - 1);
            }
            self.slots[slot] = ((hash >> 32) as u32, id32(id) + 1);
        }
    }
}

/// The content of a JSON string without its escapes. A broken escape stays as it is.
pub(super) fn unescape(raw: &[u8]) -> Cow<'_, [u8]> {
    if !raw.contains(&b'\\') {
        return Cow::Borrowed(raw);
    }
    let mut plain = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            plain.push(byte);
            continue;
        }
        let Some((&escape, after)) = rest.split_first() else {
            plain.push(b'\\');
            break;
        };
        rest = after;
        match escape {
            b'n' => plain.push(b'\n'),
            b't' => plain.push(b'\t'),
            b'r' => plain.push(b'\r'),
            b'b' => plain.push(8),
            b'f' => plain.push(12),
            b'"' | b'\\' | b'/' => plain.push(escape),
            b'u' => {
                let (unit, after) = code_unit(rest);
                let (pair, after_pair) =
                    after.strip_prefix(b"\\u").map_or((None, after), code_unit);
                let units = [unit.unwrap_or(0xfffd), pair.unwrap_or(0)];
                let joined = if (0xd800..0xdc00).contains(&units[0])
                    && (0xdc00..0xe000).contains(&units[1])
                {
                    2
                } else {
                    1
                };
                rest = if joined == 2 { after_pair } else { after };
                plain.extend_from_slice(String::from_utf16_lossy(&units[..joined]).as_bytes());
            }
            _ => plain.extend_from_slice(&[b'\\', escape]),
        }
    }
    Cow::Owned(plain)
}

/// Four hexadecimal digits, and the text after them.
fn code_unit(text: &[u8]) -> (Option<u16>, &[u8]) {
    let Some((digits, after)) =
        text.split_first_chunk::<4>().filter(|(d, _)| d.iter().all(u8::is_ascii_hexdigit))
    else {
        return (None, text);
    };
    (std::str::from_utf8(digits).ok().and_then(|d| u16::from_str_radix(d, 16).ok()), after)
}

/// The lower bits of a hash, as an index.
#[expect(clippy::cast_possible_truncation, reason = "the lower bits are wanted")]
fn low(hash: u64) -> usize {
    hash as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_first_appearances() {
        let mut interner = Interner::default();
        for round in 0..2 {
            for i in 0..1_000 {
                assert_eq!(interner.id(format!("text {i}").as_bytes()), i, "{round}");
            }
        }
        assert_eq!(interner.id(b"bad \xff"), 1_000);
        assert_eq!(interner.id(b"bad \xff"), 1_000);
        assert_eq!(interner.id("bad \u{fffd}".as_bytes()), 1_000);
        assert_eq!(&*interner.texts[1_000], "bad \u{fffd}");
    }

    #[test]
    fn escapes() {
        for (raw, plain) in [
            (r#"a\"b\\c\/"#, "a\"b\\c/"),
            (r"\u00e9\ud83d\ude00", "é😀"),
            (r"\ud83d!", "\u{fffd}!"),
            (r"\u12", "\u{fffd}12"),
            (r"\q\n", "\\q\n"),
            ("tail\\", "tail\\"),
        ] {
            assert_eq!(String::from_utf8_lossy(&unescape(raw.as_bytes())), plain, "{raw}");
        }
    }
}
