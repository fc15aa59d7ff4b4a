//! Reading LZ4 blocks, in which compilers before CUDA 12.8 keep kernels.

/// A length of 15 goes on in further bytes, until one is below 255.
fn length(bytes: &[u8], at: &mut usize, first: u8) -> Option<usize> {
    let mut all = usize::from(first);
    if first < 15 {
        return Some(all);
    }
    loop {
        let more = *bytes.get(*at)?;
        *at += 1;
        all += usize::from(more);
        if more < 255 {
            return Some(all);
        }
    }
}

/// The content of a block that has `most` bytes or fewer; none where it is damaged.
pub fn decompress(bytes: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(most);
    let mut at = 0;
    loop {
        let token = *bytes.get(at)?;
        at += 1;
        let many = length(bytes, &mut at, token >> 4)?;
        let literals = bytes.get(at..at.checked_add(many)?)?;
        if out.len() + many > most {
            return None;
        }
        out.extend_from_slice(literals);
        at += many;
        if at == bytes.len() {
            return Some(out);
        }
        let distance = usize::from(u16::from_le_bytes(*bytes.get(at..at + 2)?.first_chunk()?));
        at += 2;
        let mut left = length(bytes, &mut at, token & 15)? + 4;
        let mut from = out.len().checked_sub(distance).filter(|_| distance > 0)?;
        if out.len() + left > most {
            return None;
        }
        // What is copied may reach into what this very copy writes.
        while left > 0 {
            let n = left.min(out.len() - from);
            out.extend_from_within(from..from + n);
            from += n;
            left -= n;
        }
    }
}
