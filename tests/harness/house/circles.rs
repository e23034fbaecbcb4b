//! Circles in a graph: sets of nodes that can all be reached from each other.

/// The circles of the graph whose node `n` points to `edges[n]`, each in rising order. These are
/// its strongly connected components of two nodes and more; the graph is small, so that they are
/// read off from what every node reaches.
pub fn circles(edges: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let reached: Vec<Vec<bool>> = (0..edges.len()).map(|from| reachable(edges, from)).collect();
    let together = |a: usize, b: usize| reached[a][b] && reached[b][a];
    (0..edges.len())
        .filter(|&first| !(0..first).any(|earlier| together(earlier, first)))
        .map(|first| (0..edges.len()).filter(|&b| b == first || together(first, b)).collect())
        .filter(|circle: &Vec<usize>| circle.len() > 1)
        .collect()
}

fn reachable(edges: &[Vec<usize>], from: usize) -> Vec<bool> {
    let mut reached = vec![false; edges.len()];
    let mut open = vec![from];
    while let Some(node) = open.pop() {
        for &next in &edges[node] {
            if !core::mem::replace(&mut reached[next], true) {
                open.push(next);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn circles_are_found_and_trees_are_not() {
        // 0 -> 1 -> 2 -> 0, 2 -> 3 -> 4, 5 <-> 6.
        let edges = [vec![1], vec![2], vec![0, 3], vec![4], vec![], vec![6], vec![5]];
        assert_eq!(circles(&edges), [vec![0, 1, 2], vec![5, 6]]);
        assert_eq!(circles(&[vec![1, 2], vec![2], vec![]]), [[0usize; 0]; 0]);
    }
}
