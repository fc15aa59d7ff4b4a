//! Reading Zstandard (RFC 8878), in which compilers since CUDA 12.8 keep kernels: one frame without
//! a dictionary. What is damaged is no answer.

/// Bits read from a stream's end towards its beginning; behind the beginning are zeros.
struct Backward<'a> {
    bytes: &'a [u8],
    /// Bits that are left; below 0 for those that were read but not there.
    left: isize,
}

impl<'a> Backward<'a> {
    /// The highest bit that is set closes the stream.
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let last = *bytes.last()?;
        let padding = last.checked_ilog2()? as isize;
        Some(Self { bytes, left: 8 * (bytes.len() as isize - 1) + padding })
    }

    /// The `n` bits below bit `end`, for at most 56.
    fn bits(&self, end: isize, n: u32) -> u64 {
        if end <= 0 {
            return 0;
        }
        let start = end - n as isize;
        if start < 0 {
            return self.bits(end, end as u32) << -start;
        }
        let at = start as usize / 8;
        let word = match self.bytes.get(at..at + 8) {
            Some(eight) => u64::from_le_bytes(eight.try_into().unwrap_or_default()),
            None => {
                let mut eight = [0; 8];
                let rest = &self.bytes[at.min(self.bytes.len())..];
                eight[..rest.len()].copy_from_slice(rest);
                u64::from_le_bytes(eight)
            }
        };
        word >> (start % 8) & ((1 << n) - 1)
    }

    fn read(&mut self, n: u32) -> u64 {
        let bits = self.bits(self.left, n);
        self.left -= n as isize;
        bits
    }
}

/// One state of a decoder: what it stands for, and how the next state is found.
#[derive(Clone, Copy, Default)]
struct State {
    symbol: u8,
    bits: u8,
    base: u16,
}

/// A table of finite-state entropy codes.
#[derive(Clone)]
struct Table {
    log: u32,
    states: Vec<State>,
}

impl Table {
    /// That of one symbol, which takes no bits.
    fn of_one(symbol: u8) -> Self {
        Self { log: 0, states: vec![State { symbol, bits: 0, base: 0 }] }
    }

    fn new(log: u32, shares: &[i16]) -> Option<Self> {
        let size = 1_usize << log;
        let mut states = vec![State::default(); size];
        let mut next: Vec<u32> = Vec::new();
        let mut high = size;
        for (symbol, share) in shares.iter().enumerate() {
            next.push(share.unsigned_abs().into());
            if *share == -1 {
                high = high.checked_sub(1)?;
                states[high].symbol = symbol as u8;
            }
        }
        let (step, mut at) = ((size >> 1) + (size >> 3) + 3, 0);
        for (symbol, share) in shares.iter().enumerate() {
            for _ in 0..(*share).max(0) {
                states.get_mut(at)?.symbol = symbol as u8;
                loop {
                    at = (at + step) & (size - 1);
                    if at < high || high == 0 {
                        break;
                    }
                }
            }
        }
        if at != 0 {
            return None;
        }
        for state in &mut states {
            let count = next.get_mut(usize::from(state.symbol))?;
            let bits = log.checked_sub(count.checked_ilog2()?)?;
            state.bits = bits as u8;
            state.base = ((*count << bits) - size as u32) as u16;
            *count += 1;
        }
        Some(Self { log, states })
    }

    /// Reads the shares of all symbols; the table, and how many bytes they took.
    fn read(bytes: &[u8], most: u32) -> Option<(Self, usize)> {
        let mut at = 0;
        let bits = |at: usize, n: u32| -> u32 {
            let word = (0..4).map(|i| u32::from(*bytes.get(at / 8 + i).unwrap_or(&0)) << (8 * i));
            word.sum::<u32>() >> (at % 8) & ((1 << n) - 1)
        };
        let log = bits(at, 4) + 5;
        at += 4;
        if log > most {
            return None;
        }
        let mut left = 1_i32 << log;
        let mut shares = Vec::new();
        while left > 0 && shares.len() < 256 && at <= 8 * bytes.len() {
            let n = (left + 1).ilog2() + 1;
            let (value, low) = (bits(at, n), (1 << (n - 1)) - 1);
            let spare = (1 << n) - 1 - (left + 1) as u32;
            let value = if value & low < spare {
                at += n as usize - 1;
                value & low
            } else {
                at += n as usize;
                if value > low { value - spare } else { value }
            };
            let share = value as i16 - 1;
            left -= i32::from(share.abs());
            shares.push(share);
            // Zeros are counted: 3 says that another count follows.
            let mut zeros = if share == 0 { 3 } else { 0 };
            while zeros == 3 && shares.len() <= 256 {
                zeros = bits(at, 2);
                at += 2;
                shares.resize(shares.len() + zeros as usize, 0);
            }
        }
        let used = at.div_ceil(8);
        if left != 0 || shares.len() > 256 || used > bytes.len() {
            return None;
        }
        Some((Self::new(log, &shares)?, used))
    }
}

/// A Huffman table: symbol and length of each code, by the bits that follow in the stream.
struct Huffman {
    longest: u32,
    codes: Vec<(u8, u8)>,
}

impl Huffman {
    /// Reads a tree; the table, and how many bytes it took.
    fn read(bytes: &[u8]) -> Option<(Self, usize)> {
        let first = usize::from(*bytes.first()?);
        let mut weights = Vec::new();
        let used;
        if first >= 128 {
            let many = first - 127;
            used = 1 + many.div_ceil(2);
            for i in 0..many {
                let pair = *bytes.get(1 + i / 2)?;
                weights.push(if i % 2 == 0 { pair >> 4 } else { pair & 15 });
            }
        } else {
            used = 1 + first;
            let coded = bytes.get(1..used)?;
            let (table, begin) = Table::read(coded, 6)?;
            let mut stream = Backward::new(coded.get(begin..)?)?;
            let mut states = [stream.read(table.log) as usize, stream.read(table.log) as usize];
            while weights.len() < 256 {
                let state = *table.states.get(states[0])?;
                weights.push(state.symbol);
                states[0] = usize::from(state.base) + stream.read(state.bits.into()) as usize;
                if stream.left < 0 {
                    weights.push(table.states.get(states[1])?.symbol);
                    break;
                }
                states.swap(0, 1);
            }
        }
        Some((Self::new(weights)?, used))
    }

    /// The table of these weights, and of the last one, which follows from them.
    fn new(mut weights: Vec<u8>) -> Option<Self> {
        if weights.len() > 255 || weights.iter().any(|w| *w > 11) {
            return None;
        }
        let of = |weight: u8| if weight == 0 { 0 } else { 1_u32 << (weight - 1) };
        let total: u32 = weights.iter().map(|w| of(*w)).sum();
        let longest = total.checked_ilog2()? + 1;
        let rest = (1 << longest) - total;
        if longest > 11 || !rest.is_power_of_two() {
            return None;
        }
        weights.push(rest.ilog2() as u8 + 1);
        let mut codes = Vec::with_capacity(1 << longest);
        for weight in 1..=longest as u8 {
            let bits = longest as u8 + 1 - weight;
            for (symbol, _) in weights.iter().enumerate().filter(|(_, w)| **w == weight) {
                codes.resize(codes.len() + of(weight) as usize, (symbol as u8, bits));
            }
        }
        (codes.len() == 1 << longest).then_some(Self { longest, codes })
    }

    fn decode(&self, bytes: &[u8], many: usize, out: &mut Vec<u8>) -> Option<()> {
        let mut stream = Backward::new(bytes)?;
        for _ in 0..many {
            let (symbol, bits) = self.codes[stream.bits(stream.left, self.longest) as usize];
            stream.left -= isize::from(bits);
            out.push(symbol);
        }
        (stream.left == 0).then_some(())
    }
}

/// Base and further bits of the codes of literal lengths.
const LITERALS: [(u32, u8); 36] = {
    let mut all = [(0, 0); 36];
    let mut i = 0;
    while i < 16 {
        all[i] = (i as u32, 0);
        i += 1;
    }
    let bits = [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    let mut base = 16;
    while i < 36 {
        all[i] = (base, bits[i - 16]);
        base += 1 << bits[i - 16];
        i += 1;
    }
    all
};
/// The same of match lengths.
const MATCHES: [(u32, u8); 53] = {
    let mut all = [(0, 0); 53];
    let mut i = 0;
    while i < 32 {
        all[i] = (i as u32 + 3, 0);
        i += 1;
    }
    let bits = [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    let mut base = 35;
    while i < 53 {
        all[i] = (base, bits[i - 32]);
        base += 1 << bits[i - 32];
        i += 1;
    }
    all
};

/// What a kind of code is, where a block brings no table of its own: literal lengths, offsets,
/// match lengths.
struct Kind {
    log: u32,
    shares: &'static [i16],
    most: u32,
    symbols: usize,
}

const KINDS: [Kind; 3] = [
    Kind {
        log: 6,
        shares: &[
            4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1,
            1, 1, 1, -1, -1, -1, -1,
        ],
        most: 9,
        symbols: LITERALS.len(),
    },
    Kind {
        log: 5,
        shares: &[
            1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1,
            -1,
        ],
        most: 8,
        symbols: 32,
    },
    Kind {
        log: 6,
        shares: &[
            1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1,
        ],
        most: 9,
        symbols: MATCHES.len(),
    },
];

/// What blocks of a frame share.
struct Frame {
    out: Vec<u8>,
    most: usize,
    huffman: Option<Huffman>,
    tables: [Option<Table>; 3],
    /// The last offsets.
    recent: [usize; 3],
    literals: Vec<u8>,
}

impl Frame {
    /// Reads a block's literals; how many bytes that took.
    fn read_literals(&mut self, bytes: &[u8]) -> Option<usize> {
        let word = |n: usize| -> Option<u64> {
            let mut eight = [0; 8];
            eight[..n].copy_from_slice(bytes.get(..n)?);
            Some(u64::from_le_bytes(eight))
        };
        let first = *bytes.first()?;
        let (kind, form) = (first & 3, first >> 2 & 3);
        self.literals.clear();
        if kind < 2 {
            let (header, shift) = match form {
                0 | 2 => (1, 3),
                1 => (2, 4),
                _ => (3, 4),
            };
            let many = (word(header)? >> shift) as usize;
            if kind == 0 {
                self.literals.extend(bytes.get(header..header + many)?);
                return Some(header + many);
            }
            self.literals.resize(many, *bytes.get(header)?);
            return Some(header + 1);
        }
        let (header, width) = [(3, 10), (3, 10), (4, 14), (5, 18)][usize::from(form)];
        let word = word(header)?;
        let sized = |shift: u32| (word >> shift & ((1 << width) - 1)) as usize;
        let (many, size) = (sized(4), sized(4 + width));
        let mut body = bytes.get(header..header + size)?;
        if kind == 2 {
            let (huffman, used) = Huffman::read(body)?;
            self.huffman = Some(huffman);
            body = body.get(used..)?;
        }
        let huffman = self.huffman.as_ref()?;
        if form == 0 {
            huffman.decode(body, many, &mut self.literals)?;
            return Some(header + size);
        }
        let (sizes, mut streams) = body.split_at_checked(6)?;
        let each = many.div_ceil(4);
        for i in 0..4 {
            let size = match sizes.get(2 * i..2 * i + 2) {
                Some(two) => usize::from(u16::from_le_bytes([two[0], two[1]])),
                None => streams.len(),
            };
            let (stream, rest) = streams.split_at_checked(size)?;
            let many = if i < 3 { each } else { many.checked_sub(3 * each)? };
            huffman.decode(stream, many, &mut self.literals)?;
            streams = rest;
        }
        Some(header + size)
    }

    /// Reads a block's tables; how many bytes they took.
    fn read_tables(&mut self, modes: u8, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        for (i, kind) in KINDS.iter().enumerate() {
            let table = match modes >> (6 - 2 * i) & 3 {
                0 => Table::new(kind.log, kind.shares)?,
                1 => {
                    at += 1;
                    Table::of_one(*bytes.get(at - 1)?)
                }
                2 => {
                    let (table, used) = Table::read(bytes.get(at..)?, kind.most)?;
                    at += used;
                    table
                }
                _ => continue,
            };
            if table.states.iter().any(|s| usize::from(s.symbol) >= kind.symbols) {
                return None;
            }
            self.tables[i] = Some(table);
        }
        Some(at)
    }

    /// The distance of a match, by what a sequence says and how many literals precede it.
    fn distance(&mut self, offset: usize, literals: usize) -> Option<usize> {
        let [a, b, c] = self.recent;
        if offset > 3 {
            self.recent = [offset - 3, a, b];
        } else {
            match offset - 1 + usize::from(literals == 0) {
                0 => {}
                1 => self.recent = [b, a, c],
                2 => self.recent = [c, a, b],
                _ => self.recent = [a.checked_sub(1)?, a, b],
            }
        }
        Some(self.recent[0])
    }

    fn copy_match(&mut self, distance: usize, length: usize) -> Option<()> {
        let mut from = self.out.len().checked_sub(distance).filter(|_| distance > 0)?;
        if self.out.len() + length > self.most {
            return None;
        }
        // What is copied may reach into what this very copy writes.
        let mut left = length;
        while left > 0 {
            let n = left.min(self.out.len() - from);
            self.out.extend_from_within(from..from + n);
            from += n;
            left -= n;
        }
        Some(())
    }

    fn block(&mut self, bytes: &[u8]) -> Option<()> {
        let used = self.read_literals(bytes)?;
        let bytes = bytes.get(used..)?;
        let first = usize::from(*bytes.first()?);
        let byte = |i: usize| bytes.get(i).map(|b| usize::from(*b));
        let (many, used) = match first {
            0..128 => (first, 1),
            128..255 => (((first - 128) << 8) + byte(1)?, 2),
            _ => (byte(1)? + (byte(2)? << 8) + 0x7f00, 3),
        };
        let mut taken = 0;
        if many > 0 {
            let modes = *bytes.get(used)?;
            let used = used + 1 + self.read_tables(modes, bytes.get(used + 1..)?)?;
            taken = self.sequences(many, bytes.get(used..)?)?;
        }
        let rest = self.literals.len() - taken;
        if self.out.len() + rest > self.most {
            return None;
        }
        self.out.extend_from_slice(&self.literals[taken..]);
        Some(())
    }

    /// Carries out a block's sequences; how many literals they took.
    fn sequences(&mut self, many: usize, bytes: &[u8]) -> Option<usize> {
        let mut stream = Backward::new(bytes)?;
        let tables = self.tables.clone();
        let [Some(literals), Some(offsets), Some(matches)] = &tables else { return None };
        let mut at = [literals, offsets, matches].map(|t| stream.read(t.log) as usize);
        let mut taken = 0;
        for i in 0..many {
            let states = [literals.states[at[0]], offsets.states[at[1]], matches.states[at[2]]];
            let code = u32::from(states[1].symbol);
            let offset = (1_usize << code) + stream.read(code) as usize;
            let (base, bits) = MATCHES[usize::from(states[2].symbol)];
            let length = base as usize + stream.read(bits.into()) as usize;
            let (base, bits) = LITERALS[usize::from(states[0].symbol)];
            let before = base as usize + stream.read(bits.into()) as usize;
            if i + 1 < many {
                for kind in [0, 2, 1] {
                    let state = states[kind];
                    at[kind] = usize::from(state.base) + stream.read(state.bits.into()) as usize;
                }
            }
            let literals = self.literals.get(taken..taken + before)?;
            if self.out.len() + before > self.most {
                return None;
            }
            self.out.extend_from_slice(literals);
            taken += before;
            let distance = self.distance(offset, before)?;
            self.copy_match(distance, length)?;
        }
        (stream.left == 0).then_some(taken)
    }
}

/// The content of a frame that has `most` bytes or fewer.
pub fn decompress(bytes: &[u8], most: usize) -> Option<Vec<u8>> {
    let header = *bytes.get(4)?;
    if !bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        return None;
    }
    let single = header >> 5 & 1;
    let size = [usize::from(single), 2, 4, 8][usize::from(header >> 6)];
    let dictionary = [0, 1, 2, 4][usize::from(header & 3)];
    let mut at = 5 + usize::from(1 - single) + dictionary + size;
    let mut frame = Frame {
        out: Vec::with_capacity(most),
        most,
        huffman: None,
        tables: [None, None, None],
        recent: [1, 4, 8],
        literals: Vec::new(),
    };
    loop {
        let [a, b, c] = *bytes.get(at..at + 3)?.first_chunk()?;
        let block = u32::from_le_bytes([a, b, c, 0]);
        let (last, kind, size) = (block & 1 == 1, block >> 1 & 3, (block >> 3) as usize);
        at += 3;
        let body = bytes.get(at..at + if kind == 1 { 1 } else { size })?;
        at += body.len();
        if kind < 2 && frame.out.len() + size > most {
            return None;
        }
        match kind {
            0 => frame.out.extend_from_slice(body),
            1 => frame.out.resize(frame.out.len() + size, body[0]),
            2 => frame.block(body)?,
            _ => return None,
        }
        if last {
            return Some(frame.out);
        }
    }
}
