//! The tensors that recorded forward passes read without computing them, each kept once.

use std::collections::HashMap;
use std::hash::Hash;

use burn::tensor::TensorData;
use xxhash_rust::xxh3::Xxh3;

/// Tensors that recordings read without computing them, each once however many read it.
#[derive(Default)]
pub(crate) struct Values {
    pub(super) all: Vec<Value>,
    by_digest: HashMap<u128, Vec<usize>>,
}

/// One of them.
pub(crate) struct Value {
    pub(crate) data: TensorData,
    /// Hash of the dtype, the shape and the values.
    pub(super) digest: u128,
    uses: usize,
}

impl Value {
    /// Returns true if it is read under several ids, of one recording or of several.
    pub(crate) fn is_shared(&self) -> bool {
        self.uses > 1
    }
}

impl Values {
    /// Counts a use of a tensor, and gives its number.
    pub(super) fn add(&mut self, data: TensorData) -> usize {
        let mut hasher = Xxh3::new();
        data.dtype().hash(&mut hasher);
        data.shape().as_slice().hash(&mut hasher);
        hasher.update(data.as_bytes());
        let digest = hasher.digest128();
        let alike = self.by_digest.entry(digest).or_default();
        if let Some(&same) = alike.iter().find(|&&other| self.all[other].data == data) {
            self.all[same].uses += 1;
            return same;
        }
        alike.push(self.all.len());
        self.all.push(Value { data, digest, uses: 1 });
        self.all.len() - 1
    }

    pub(crate) fn get(&self, number: usize) -> &Value {
        &self.all[number]
    }

    /// Numbers of the tensors that are shared, and these.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (usize, &TensorData)> {
        let all = self.all.iter().enumerate();
        all.filter(|(_, value)| value.is_shared()).map(|(number, value)| (number, &value.data))
    }

    /// Bytes of the tensors that are shared.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared().map(|(_, data)| data.as_bytes().len()).sum()
    }
}
