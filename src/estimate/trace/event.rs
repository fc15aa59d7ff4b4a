//! Parses one event of a Chrome trace without copying.
//!
//! Only the fields that the estimator uses are read. Reading stops as soon as it is clear that the
//! event is of no use.

use super::scan::{Cursor, Stop};

/// The kind of an event, from its category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Category {
    /// `cpu_op`, or `Operator` as PyTorch before 1.11 wrote.
    Operator,
    /// `user_annotation`.
    Annotation,
    /// `python_function`.
    Python,
    /// Another category, or none.
    #[default]
    Other,
}

/// An event's fields as they are in the file: strings with their escapes, numbers as text. A
/// missing field is empty.
#[derive(Debug, Default)]
pub(super) struct Event<'a> {
    /// `X`, `i`, …; 0 if there is none. It is the only field that is set in an event of no use.
    pub phase: u8,
    pub category: Category,
    pub name: &'a [u8],
    pub process: &'a [u8],
    pub thread: &'a [u8],
    pub time: &'a [u8],
    pub duration: &'a [u8],
    /// `Input Dims`, `Input Strides`, `Input type`, `Concrete Inputs`.
    pub inputs: [Option<&'a [u8]>; 4],
    pub sequence: &'a [u8],
    pub address: &'a [u8],
    pub bytes: &'a [u8],
    pub device_type: &'a [u8],
    pub device: &'a [u8],
    pub total_allocated: &'a [u8],
    pub total_reserved: &'a [u8],
}

/// The prefix of a module call's name.
pub(super) const MODULE: &[u8] = b"nn.Module: ";
/// The name of a memory event.
pub(super) const MEMORY: &[u8] = b"[memory]";

impl<'a> Event<'a> {
    /// Parses the object at the start of `bytes`. Returns it and its length.
    pub fn parse(bytes: &'a [u8]) -> Result<(Self, usize), Stop> {
        let mut cursor = Cursor::new(bytes);
        let mut event = Self::default();
        cursor.expect(b'{')?;
        while let Some(key) = key(&mut cursor)? {
            match key {
                b"ph" => event.phase = cursor.plain()?.first().copied().unwrap_or(0),
                b"cat" => {
                    event.category = match cursor.plain()? {
                        b"cpu_op" | b"Operator" => Category::Operator,
                        b"user_annotation" => Category::Annotation,
                        b"python_function" => Category::Python,
                        _ => Category::Other,
                    }
                }
                b"name" => {
                    event.name = cursor.plain()?;
                    if event.useless() {
                        cursor.rest_of_object()?;
                        return Ok((Self { phase: event.phase, ..Self::default() }, cursor.at));
                    }
                }
                b"pid" => event.process = cursor.plain()?,
                b"tid" => event.thread = cursor.plain()?,
                b"ts" => event.time = cursor.plain()?,
                b"dur" => event.duration = cursor.plain()?,
                b"args" if cursor.token()? == b'{' => event.arguments(&mut cursor)?,
                _ => drop(cursor.value()?),
            }
            end_of_member(&mut cursor)?;
        }
        Ok((event, cursor.at))
    }

    /// Whether the fields read so far show that the event is of no use. PyTorch writes them in an
    /// order that allows this.
    fn useless(&self) -> bool {
        match (self.phase, self.category) {
            (b'X', Category::Python) => !self.name.starts_with(MODULE),
            (b'X', Category::Operator | Category::Annotation) => false,
            // The category may still follow.
            (b'X' | b'B' | b'E' | 0, _) => false,
            (b'i' | b'I', _) => self.name != MEMORY,
            _ => true,
        }
    }

    fn arguments(&mut self, cursor: &mut Cursor<'a>) -> Result<(), Stop> {
        cursor.at += 1;
        while let Some(key) = key(cursor)? {
            match key {
                b"Input Dims" | b"Input dims" => self.inputs[0] = Some(cursor.value()?),
                b"Input Strides" => self.inputs[1] = Some(cursor.value()?),
                b"Input type" => self.inputs[2] = Some(cursor.value()?),
                b"Concrete Inputs" => self.inputs[3] = Some(cursor.value()?),
                b"Sequence number" => self.sequence = cursor.plain()?,
                b"Addr" => self.address = cursor.plain()?,
                b"Bytes" => self.bytes = cursor.plain()?,
                b"Device Type" => self.device_type = cursor.plain()?,
                b"Device Id" => self.device = cursor.plain()?,
                b"Total Allocated" => self.total_allocated = cursor.plain()?,
                b"Total Reserved" => self.total_reserved = cursor.plain()?,
                _ => drop(cursor.value()?),
            }
            end_of_member(cursor)?;
        }
        Ok(())
    }
}

/// Reads the next member's key and its colon. `None` at the end of the object, which is read too.
fn key<'a>(cursor: &mut Cursor<'a>) -> Result<Option<&'a [u8]>, Stop> {
    loop {
        match cursor.token()? {
            b'"' => {
                let key = cursor.string()?;
                cursor.expect(b':')?;
                return Ok(Some(key));
            }
            b'}' => {
                cursor.at += 1;
                return Ok(None);
            }
            b',' => cursor.at += 1,
            _ => return Err(Stop::Bad(cursor.at)),
        }
    }
}

/// After a value: reads a comma, or stops before the object's end.
fn end_of_member(cursor: &mut Cursor<'_>) -> Result<(), Stop> {
    match cursor.token()? {
        b',' => cursor.at += 1,
        b'}' => {}
        _ => return Err(Stop::Bad(cursor.at)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stand_in_any_order_and_the_last_wins() {
        let text = br#"{"args": {"Bytes": -4, "Bytes": "-8", "Addr": 77, "x": [{"y": "}"}]}, "ts": "1.5", "name": "[memory]", "ph": "i", "cat": 3} rest"#;
        let (event, used) = Event::parse(text).unwrap();
        assert_eq!(
            (event.phase, event.name, event.bytes, event.address, event.time),
            (b'i', MEMORY, &b"-8"[..], &b"77"[..], &b"1.5"[..])
        );
        assert_eq!(&text[used..], b" rest");
    }

    #[test]
    fn useless_events_are_stepped_over() {
        let text = br#"{"ph": "X", "cat": "python_function", "name": "f.py(1): {", "args": {"a": "\"}"}}, {"#;
        let (event, used) = Event::parse(text).unwrap();
        assert_eq!((event.phase, event.name, &text[used..]), (b'X', &b""[..], &b", {"[..]));
    }

    #[test]
    fn every_cut_asks_for_more_and_damage_says_where() {
        let text = br#"{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1.5, "args": {"Input Dims": [[1, 2], []], "k": null}}"#;
        for cut in 0..text.len() {
            assert_eq!(Event::parse(&text[..cut]).err(), Some(Stop::More), "{cut}");
        }
        assert!(Event::parse(text).is_ok());
        assert_eq!(Event::parse(br#"{"ph": "X" "cat""#).err(), Some(Stop::Bad(11)));
    }
}
