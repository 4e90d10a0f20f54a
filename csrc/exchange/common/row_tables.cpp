// Fills the row tables of combine.
#include "exchange/common/row_tables.hpp"

#include <algorithm>

namespace ep {

uint32_t output_table(const Group& group, const DispatchState& state, Reduction reduction,
                      const SumTable& table) {
  uint32_t row = 0;
  const auto begin = [&](const TokenRun& run, uint32_t slot) {
    std::fill_n(table.terms + size_t(row) * table.width, table.width, -1);
    std::fill_n(table.weights + size_t(row) * table.width, table.width, 0.0f);
    table.slots[row] = int64_t(slot_of(group.layout, run.source, slot));
  };
  for (const TokenRun& run : state.runs) {
    const Entry* entries = state.entries.data() + run.first;
    if (reduction == Reduction::kSource) {
      for (uint32_t i = 0; i < run.count; ++i, ++row) {
        begin(run, run.token * group.layout.choices_per_token + entries[i].k);
        table.terms[size_t(row) * table.width] = entries[i].row;
        table.weights[size_t(row) * table.width] = 1.0f;
      }
      continue;
    }
    begin(run, run.token);
    for (uint32_t i = 0; i < run.count; ++i) {
      table.terms[size_t(row) * table.width + i] = entries[i].row;
      table.weights[size_t(row) * table.width + i] = entries[i].weight;
    }
    ++row;
  }
  return row;
}

void sum_table(const Group& group, const CombineState& state, const SumTable& table) {
  for (uint32_t t = 0; t < state.dispatch->tokens; ++t) {
    int64_t* terms = table.terms + size_t(t) * table.width;
    float* weights = table.weights + size_t(t) * table.width;
    std::fill_n(terms, table.width, -1);
    std::fill_n(weights, table.width, 0.0f);
    uint32_t count = 0;
    for_each_output(group, state, t, [&](uint64_t slot, float weight) {
      terms[count] = int64_t(slot);
      weights[count++] = weight;
    });
  }
}

}  // namespace ep
