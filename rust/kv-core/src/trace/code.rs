//! How numbers, lists and texts are spelt: LEB128 varints.

/// Elements of a list that are shown in words.
const SHOWN: usize = 8;

/// Bytes that are read one after the other. No method panics, whatever they are.
pub(super) struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> Result<u8, String> {
        let (&byte, rest) = self.0.split_first().ok_or("it ends too early")?;
        self.0 = rest;
        Ok(byte)
    }

    /// The length of a list of which each element takes a byte or more: never more than is there.
    pub(super) fn len(&mut self) -> Result<usize, String> {
        let len = usize::take(self)?;
        if len > self.0.len() {
            let left = self.0.len();
            return Err(format!("a list of {len} elements in {left} bytes"));
        }
        Ok(len)
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], String> {
        let len = self.len()?;
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        Ok(bytes)
    }
}

/// Adds one byte of a varint to those before it; the number once that was the last one.
pub(super) fn next_digit(
    value: &mut u64,
    shift: &mut u32,
    byte: u8,
) -> Result<Option<u64>, String> {
    let digit = u64::from(byte & 0x7f);
    if *shift > 63 || (*shift == 63 && digit > 1) {
        return Err("a number of more than 64 bits".into());
    }
    *value |= digit << *shift;
    *shift += 7;
    Ok((byte < 0x80).then_some(*value))
}

/// Something that is written as a few varints.
pub(super) trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(from: &mut Bytes<'_>) -> Result<Self, String>;
    fn words(&self) -> String;
}

impl Field for u64 {
    fn put(&self, out: &mut Vec<u8>) {
        let mut rest = *self;
        while rest >= 0x80 {
            out.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        out.push(rest as u8);
    }

    fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
        let (mut value, mut shift) = (0, 0);
        loop {
            if let Some(number) = next_digit(&mut value, &mut shift, from.byte()?)? {
                return Ok(number);
            }
        }
    }

    fn words(&self) -> String {
        self.to_string()
    }
}

macro_rules! narrower {
    ($($type:ty),*) => {
        $(impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                (*self as u64).put(out);
            }

            fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
                let number = u64::take(from)?;
                Self::try_from(number).map_err(|_| format!("{number} is too large a {}", stringify!($type)))
            }

            fn words(&self) -> String {
                self.to_string()
            }
        })*
    };
}
narrower!(u32, usize);

impl Field for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
        match from.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("{other} is neither yes nor no")),
        }
    }

    fn words(&self) -> String {
        self.to_string()
    }
}

impl<T: Field> Field for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
        bool::take(from)?.then(|| T::take(from)).transpose()
    }

    fn words(&self) -> String {
        self.as_ref().map_or("none".into(), Field::words)
    }
}

impl Field for Box<[u8]> {
    fn put(&self, out: &mut Vec<u8>) {
        self.len().put(out);
        out.extend_from_slice(self);
    }

    fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
        Ok(from.bytes()?.into())
    }

    fn words(&self) -> String {
        format!("{:?}", self.escape_ascii().to_string())
    }
}

/// A list, its elements as they are: tokens, counts, redirects.
macro_rules! list {
    ($($type:ty),*) => {
        $(impl Field for Vec<$type> {
            fn put(&self, out: &mut Vec<u8>) {
                self.len().put(out);
                self.iter().for_each(|element| element.put(out));
            }

            fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
                (0..from.len()?).map(|_| Field::take(from)).collect()
            }

            fn words(&self) -> String {
                in_words(self)
            }
        })*
    };
}
list!(u32, usize, crate::step::Redirect);

/// Ids, which mostly ascend: each as its distance from the one before.
impl Field for Vec<u64> {
    fn put(&self, out: &mut Vec<u8>) {
        self.len().put(out);
        let mut before = 0;
        for &id in self {
            let distance = id.wrapping_sub(before).cast_signed();
            ((distance << 1) ^ (distance >> 63))
                .cast_unsigned()
                .put(out);
            before = id;
        }
    }

    fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
        let len = from.len()?;
        let mut before = 0_u64;
        let next = |_| {
            let zigzag = u64::take(from)?;
            let distance = (zigzag >> 1) ^ (zigzag & 1).wrapping_neg();
            before = before.wrapping_add(distance);
            Ok(before)
        };
        (0..len).map(next).collect()
    }

    fn words(&self) -> String {
        in_words(self)
    }
}

fn in_words<T: Field>(list: &[T]) -> String {
    let mut shown: Vec<String> = list.iter().take(SHOWN).map(Field::words).collect();
    if list.len() > SHOWN {
        shown.push(format!("... {} in all", list.len()));
    }
    format!("[{}]", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back<T: Field + PartialEq + std::fmt::Debug>(value: T) {
        let mut bytes = Vec::new();
        value.put(&mut bytes);
        let mut from = Bytes::new(&bytes);
        assert_eq!(T::take(&mut from).as_ref(), Ok(&value));
        assert!(from.is_empty());
        for cut in 0..bytes.len() {
            assert!(T::take(&mut Bytes::new(&bytes[..cut])).is_err());
        }
    }

    #[test]
    fn what_was_put_is_taken() {
        for number in [0, 1, 127, 128, 1 << 35, u64::MAX - 1, u64::MAX] {
            there_and_back(number);
            there_and_back(vec![number, 0, number, 7, u64::MAX]);
        }
        there_and_back(u32::MAX);
        there_and_back(vec![0_u32, 127, 128, u32::MAX]);
        there_and_back(Some(usize::MAX));
        there_and_back(None::<usize>);
        there_and_back(Box::<[u8]>::from(*b"tenant"));
        there_and_back(true);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let too_long = [0xff; 11];
        assert!(u64::take(&mut Bytes::new(&too_long)).is_err());
        let mut too_large = [0xff; 10];
        too_large[9] = 2;
        assert!(u64::take(&mut Bytes::new(&too_large)).is_err());
        assert!(u32::take(&mut Bytes::new(&[0xff, 0xff, 0xff, 0xff, 0x1f])).is_err());
        assert!(bool::take(&mut Bytes::new(&[2])).is_err());
        // A list that says it has 2^63 elements takes no memory.
        let huge = [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1, 0];
        assert!(Vec::<u32>::take(&mut Bytes::new(&huge)).is_err());
        assert!(Vec::<u64>::take(&mut Bytes::new(&huge)).is_err());
        assert!(Box::<[u8]>::take(&mut Bytes::new(&huge)).is_err());
    }

    #[test]
    fn long_lists_are_short_in_words() {
        let eight = "[0, 1, 2, 3, 4, 5, 6, 7]";
        assert_eq!((0..8).collect::<Vec<u64>>().words(), eight);
        assert_eq!(vec![1_u32, 2].words(), "[1, 2]");
        assert_eq!(
            (0..20).collect::<Vec<u64>>().words(),
            "[0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]"
        );
    }
}
