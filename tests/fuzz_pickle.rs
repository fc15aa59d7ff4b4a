//! Damaged snapshots through the library: any answer will do, but no panic, no hang, and no memory beyond the limit that
//! the reader is given. `NEAP_CASES` sets the number of cases.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::counting::{Counting, Since};
use common::random::Random;
use common::seeds;
use neap::sim::requests::{PRIVATE, Request};
use neap::sim::snapshot::{Snapshot, read_within};
use neap::units::Bytes;

#[global_allocator]
static COUNTING: Counting = Counting;

/// What a case may take, and what buffers may add to it.
const LIMIT: usize = 1 << 20;
const BUFFERS: usize = 1 << 20;

impl Random {
    /// An instruction that reads, with an operand that may be anything.
    fn instruction(&mut self) -> Vec<u8> {
        const CODES: &[u8] = b"hgjpqr\x94N\x88\x89KMJ\x8a\x8bILFG\x8cUXT\x8dSVCB\x8e(}])dlt\x85\x86\x87aesu012\x80\x95.cRbioPQ\x81\x93\x97";
        let code = CODES[self.below(CODES.len())];
        let length = match code {
            b'h' | b'q' | b'K' | 0x80 => 1,
            b'M' => 2,
            b'j' | b'r' | b'J' => 4,
            b'G' | 0x95 => 8,
            b'g' | b'p' | b'I' | b'L' | b'F' => {
                return [&[code][..], self.below(300).to_string().as_bytes(), b"\n"].concat();
            }
            _ => 0,
        };
        let wild = self.below(3) == 0;
        let operand = (0..length).map(|i| {
            if wild { self.below(256) as u8 } else { u8::from(i == 0) * self.below(200) as u8 }
        });
        std::iter::once(code).chain(operand).collect()
    }

    /// Bits flipped, stretches cut out or copied, instructions put in once or often, numbers replaced, the end cut off.
    fn damage(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..=self.below(3) {
            let at = self.below(bytes.len());
            let end = (at + 1 + self.below(60)).min(bytes.len());
            match self.below(8) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => drop(bytes.drain(at..end)),
                2 => {
                    let piece = bytes[at..end].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, piece);
                }
                3 => drop(bytes.splice(at..at, self.instruction())),
                4 => {
                    let often = [2, 50, 5000][self.below(3)];
                    let unit = [self.instruction(), self.instruction()].concat();
                    bytes.splice(at..at, unit.repeat(often));
                }
                5 => {
                    // A number of the pickle's own, made extreme.
                    let Some(from) = bytes[at..]
                        .iter()
                        .position(|b| [0x8a, b'J', b'K', b'M'].contains(b))
                        .map(|p| at + p)
                    else {
                        continue;
                    };
                    let number = [0, -1, 1, i64::MAX, i64::MIN, 1 << 62, 1 << 32][self.below(7)];
                    let length = match bytes[from] {
                        0x8a => 2 + bytes.get(from + 1).map_or(0, |n| usize::from(*n)),
                        b'J' => 5,
                        b'M' => 3,
                        _ => 2,
                    };
                    let to = (from + length).min(bytes.len());
                    bytes.splice(from..to, [&[0x8a, 8][..], &number.to_le_bytes()].concat());
                }
                6 => {
                    // One word of a snapshot in another's place.
                    let words = [
                        "action",
                        "addr",
                        "size",
                        "frames",
                        "segment_free",
                        "alloc",
                        "oom",
                        "segments",
                        "blocks",
                        "free_completed",
                    ];
                    let word = words[self.below(words.len())];
                    let Some(from) = bytes[at..].iter().position(|b| *b == 0x8c).map(|p| at + p)
                    else {
                        continue;
                    };
                    let to = (from + 2 + bytes.get(from + 1).map_or(0, |n| usize::from(*n)))
                        .min(bytes.len());
                    bytes.splice(
                        from..to,
                        [&[0x8c, word.len() as u8][..], word.as_bytes()].concat(),
                    );
                }
                _ if self.below(4) == 0 => bytes.truncate(at),
                _ => bytes[at] = self.below(256) as u8,
            }
            if bytes.is_empty() {
                bytes.push(b'.');
            }
        }
        bytes
    }
}

/// What every sequence keeps, whatever it was read from.
fn consistent(snapshot: &Snapshot) {
    let mut live = Vec::new();
    for request in &snapshot.requests {
        match *request {
            Request::Allocate { id, stream, .. } => {
                assert_eq!(id as usize, live.len());
                assert!(((stream & !PRIVATE) as usize) < snapshot.streams.len());
                live.push(true);
            }
            Request::Free { id } => assert!(std::mem::replace(&mut live[id as usize], false)),
            Request::EmptyCache => {}
        }
    }
    assert!(snapshot.expected_reserved.as_ref().is_none_or(|e| e.len() == snapshot.requests.len()));
    assert!(snapshot.failed.iter().all(|id| (*id as usize) < live.len()));
}

#[test]
fn damaged_snapshots_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.pickle");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/snapshots");
    let mut sources: Vec<Vec<u8>> = ["0", "1", "2", "4"]
        .map(|p| std::fs::read(fixtures.join(format!("small-{p}.pickle"))).unwrap())
        .to_vec();
    let mut real = Vec::new();
    let mut packed =
        neap::files::open(&fixtures.join("tiny_cnn-adam-empty_cache.pickle.gz")).unwrap();
    std::io::Read::read_to_end(&mut packed, &mut real).unwrap();
    sources.push(real);
    let mut read = 0;
    let mut inputs = 0;
    for seed in seeds(34_000) {
        inputs += 1;
        let mut random = Random(seed);
        // The real one is large: it comes once in 256.
        let source = if random.below(256) == 0 { 4 } else { random.below(4) };
        // A file written over is flushed to the disk by some file systems; a new one isn't.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, random.damage(&sources[source])).unwrap();
        let device = [None, Some(0), Some(1)][random.below(3)];
        let (memory, start) = (Since::now(), Instant::now());
        let lines = random.below(2) == 0;
        let limit = Bytes(LIMIT as u64);
        let read_it = || read_within(&path, device, limit, lines);
        let result = std::panic::catch_unwind(read_it);
        let (took, most) = (start.elapsed(), memory.peak());
        let Ok(result) = result else { panic!("seed {seed}: it panics") };
        assert!(most <= LIMIT + BUFFERS, "seed {seed}: {most} bytes");
        assert!(took < Duration::from_secs(20), "seed {seed}: {took:?}");
        match result {
            Ok(snapshot) => {
                consistent(&snapshot);
                read += 1;
            }
            Err(e) => assert!(e.to_string().len() < 1000, "seed {seed}: {e}"),
        }
    }
    // The damage is of use only while some of it gets through.
    assert!(read * 50 > inputs, "{read} of {inputs} were read");
}
