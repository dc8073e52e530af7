// The net of train_transformer: a GPT, which foretells the next letter from those before it.
#pragma once

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "transformer_settings.h"

namespace transformer {

using Column = sirtaki::ColumnParallelLinearOptions;
using Row = sirtaki::RowParallelLinearOptions;

// A block lets each letter look at those before it, and then thinks about what it has seen. The ranks
// of the set share its heads, and what it thinks; with one rank the layers are torch::nn::Linear.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, const sirtaki::ProcessSet& set)
      : norm1(torch::nn::LayerNormOptions({width})),
        qkv(Column(width, 3 * width).blocks(3).unit(kHeadWidth).process_set(set)),
        projection(Row(width, width).unit(kHeadWidth).process_set(set)),
        norm2(torch::nn::LayerNormOptions({width})),
        expand(Column(width, 4 * width).process_set(set)),
        contract(Row(4 * width, width).process_set(set)) {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("projection", projection);
    register_module("norm2", norm2);
    register_module("expand", expand);
    register_module("contract", contract);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = x + attention(norm1(x));
    return y + contract(torch::gelu(expand(norm2(y))));
  }

  torch::Tensor attention(const torch::Tensor& x) {
    const auto heads = [](const torch::Tensor& t) {  // batch x heads x letters x kHeadWidth
      return t.unflatten(2, {-1, kHeadWidth}).transpose(1, 2);
    };
    const auto parts = qkv(x).chunk(3, /*dim=*/2);
    const torch::Tensor seen = torch::scaled_dot_product_attention(
        heads(parts[0]), heads(parts[1]), heads(parts[2]), /*attn_mask=*/{}, /*dropout_p=*/0,
        /*is_causal=*/true);
    return projection(seen.transpose(1, 2).flatten(2));
  }

  torch::nn::LayerNorm norm1;
  sirtaki::ColumnParallelLinear qkv;
  sirtaki::RowParallelLinear projection;
  torch::nn::LayerNorm norm2;
  sirtaki::ColumnParallelLinear expand;
  sirtaki::RowParallelLinear contract;
};
TORCH_MODULE(Block);

inline torch::Tensor run_block(Block block, const torch::Tensor& x, bool recompute) {
  const auto run = [block](const torch::Tensor& in) mutable { return block->forward(in); };
  return recompute ? sirtaki::recompute(run, x) : block->forward(x);
}

struct GptImpl : torch::nn::Module {
  GptImpl(const Settings& settings, const sirtaki::ProcessSet& set)
      : recompute(settings.recompute),
        letters(sirtaki::ParallelEmbeddingOptions(kBytes, settings.width).process_set(set)),
        places(settings.context, settings.width),
        norm(torch::nn::LayerNormOptions({settings.width})),
        loss(sirtaki::ParallelCrossEntropyOptions(kBytes).process_set(set)) {
    register_module("letters", letters);
    register_module("places", places);
    for (std::int64_t i = 0; i < settings.layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(settings.width, set)));
    }
    register_module("norm", norm);
    // For GPT-2's width of 768 this is its 0.02.
    const double deviation = 0.5 / std::sqrt(static_cast<double>(settings.width));
    for (const auto& parameter : parameters()) {
      if (parameter.dim() != 2) continue;
      sirtaki::fill_whole(parameter, [&](torch::Tensor whole) { whole.normal_(0, deviation); });
    }
  }

  // For each letter the logits of the next: windows x letters x this rank's part of kBytes.
  torch::Tensor forward(const torch::Tensor& text) {
    torch::Tensor x = letters(text) + places(torch::arange(text.size(1), text.device()));
    for (const Block& block : blocks) x = run_block(block, x, recompute);
    return letters->logits(norm(x));  // one matrix, both ways
  }

  const bool recompute;
  sirtaki::ParallelEmbedding letters;
  torch::nn::Embedding places;
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm;
  sirtaki::ParallelCrossEntropy loss;
};
TORCH_MODULE(Gpt);

// Windows have the letter after their last one, too: each letter is foretold from those before it.
inline torch::Tensor inputs_of(const torch::Tensor& windows) { return windows.slice(1, 0, -1); }
inline torch::Tensor targets_of(const torch::Tensor& windows) { return windows.slice(1, 1); }

// The mean loss of a letter of these windows.
inline torch::Tensor loss_of(Gpt& gpt, const torch::Tensor& windows) {
  return gpt->loss(gpt(inputs_of(windows)), targets_of(windows));
}

}  // namespace transformer
