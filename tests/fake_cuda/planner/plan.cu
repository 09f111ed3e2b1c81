// Plans of flashinfer's kernels for sequences from standard input, without a GPU.
//
// A line is: in a graph? sequences, query heads, KV heads, head size, page size, window or -1, and
// for each sequence its rows and its keys. Answers with the bytes taken of both workspaces.
#include <cstdio>
#include <exception>
#include <flashinfer/attention/scheduler.cuh>
#include <vector>

int main() {
  int graph, batch, heads, kv_heads, dim, page, window;
  while (scanf("%d %d %d %d %d %d %d", &graph, &batch, &heads, &kv_heads, &dim, &page, &window) == 7) {
    std::vector<int> rows{0}, pages{0};
    for (int sequence = 0; sequence < batch; ++sequence) {
      int own_rows, keys;
      if (scanf("%d %d", &own_rows, &keys) != 2) return 1;
      rows.push_back(rows.back() + own_rows);
      pages.push_back(pages.back() + (keys + page - 1) / page);
    }
    size_t floats = 0, ints = 0;
    try {
      flashinfer::PrefillPlanWorkspaceSize<int>(
          floats, ints, rows.data(), pages.data(), rows.back(), batch, heads, kv_heads, dim, dim, page,
          graph, sizeof(short), window, -1, false, 0, 0, nullptr);
      printf("%zu %zu\n", floats, ints);
    } catch (const std::exception& error) {
      printf("error: %s\n", error.what());
    }
    fflush(stdout);
  }
}
