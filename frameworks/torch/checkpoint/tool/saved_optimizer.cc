#include "frameworks/torch/checkpoint/tool/saved_optimizer.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>

#include "frameworks/torch/checkpoint/checkpoint_reading.h"

namespace sirtaki::detail {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// "… [3, 4]"
std::vector<std::int64_t> SizesIn(const std::string& line) {
  std::vector<std::int64_t> sizes;
  std::size_t at = line.rfind('[');
  if (at == std::string::npos || line.back() != ']') throw std::runtime_error("no shape: " + line);
  for (++at; at < line.size() - 1; at = std::min(line.find_first_of(",]", at), line.size()) + 1) {
    sizes.push_back(std::stoll(line.substr(at)));
  }
  return sizes;
}

std::int64_t ReadCount(InputArchive& archive, const std::string& key) {
  return Read<at::Tensor>(archive, key).item<std::int64_t>();
}

bool HasSameNames(const std::map<std::string, c10::IValue>& a,
                  const std::map<std::string, c10::IValue>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.first == y.first; });
}

}  // namespace

Items ItemsOf(InputArchive& archive) {
  Items items;
  for (const std::string& key : archive.keys()) {
    items.emplace_back(key, Read<c10::IValue>(archive, key));
  }
  return items;
}

SavedOptimizer::SavedOptimizer(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    const std::size_t with = line.find(" with ");
    if (line.starts_with("group ") && with != std::string::npos) {
      groups_.push_back({line.substr(with + 6), {}, {}});
      continue;
    }
    if (groups_.empty()) throw std::runtime_error("a parameter of no group: " + line);
    groups_.back().places.push_back(parameters_.size());
    Parameter& parameter = parameters_.emplace_back();
    parameter.text = line;
    parameter.sizes = SizesIn(line);
    parameter.first_place = parameters_.size() - 1;
    for (const std::int64_t extent : parameter.sizes) parameter.numel *= extent;
  }
  ranges_.resize(parameters_.size());
  with_state_.resize(parameters_.size());
}

std::string SavedOptimizer::Kind() const {
  static constexpr std::array<std::string_view, 5> kKinds = {"SGD", "Adam", "AdamW", "RMSprop",
                                                             "Adagrad"};
  for (const std::string_view kind : kKinds) {
    const std::string options = "torch::optim::" + std::string(kind) + "Options";
    const auto is_it = [&](const Group& group) { return group.kind == options; };
    if (std::all_of(groups_.begin(), groups_.end(), is_it)) return std::string(kind);
  }
  return {};
}

// The archive of a rank names, in each group, only the parameters that it has something of.
std::vector<Piece> SavedOptimizer::ReadPieces(InputArchive& archive, bool keep) {
  c10::IValue begins;
  c10::IValue counts;
  c10::IValue strides;
  const bool is_shard = archive.try_read("begins", begins) && archive.try_read("counts", counts);
  const bool has_strides = archive.try_read("strides", strides);
  const std::size_t places = parameters_.size();
  if (is_shard && (begins.toListRef().size() != places || counts.toListRef().size() != places ||
                   (has_strides && strides.toListRef().size() != places))) {
    throw std::runtime_error("a shard is of " + std::to_string(begins.toListRef().size()) +
                             " parameters, and the optimizer has " + std::to_string(places));
  }
  InputArchive own = ReadNested(archive, "optimizer", "optimizer");
  InputArchive states;
  InputArchive groups;
  const bool is_known = own.try_read("state", states) && own.try_read("param_groups", groups);
  if (!is_known && (keep || !is_shard)) {
    throw std::runtime_error(
        "the optimizer's save() does not write what LibTorch's classes write: only "
        "load_checkpoint() "
        "in its program can read it");
  }
  if (is_known &&
      ReadCount(groups, "param_groups/size") != static_cast<std::int64_t>(groups_.size())) {
    throw std::runtime_error("it has another number of groups than its description");
  }
  std::vector<Piece> pieces;
  std::map<std::string, std::size_t> first_places;  // by the parameter's key on that rank
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    InputArchive group;
    if (is_known) {
      group = ReadNested(groups, "param_groups/" + std::to_string(g), "group");
      InputArchive options = ReadNested(group, "options", "options of a group");
      groups_[g].options = ItemsOf(options);
    }
    std::int64_t index = 0;
    for (const std::size_t place : groups_[g].places) {
      Parameter& parameter = parameters_[place];
      Piece piece = {place, place, 0, parameter.numel, {}};
      if (is_shard) {
        piece.begin = begins.toListRef()[place].toInt();
        piece.count = counts.toListRef()[place].toInt();
        if (has_strides) parameter.strides = strides.toListRef()[place].toIntVector();
        if (piece.begin < 0 || piece.count < 0 || piece.begin > parameter.numel - piece.count) {
          throw std::runtime_error("a shard does not fit " + parameter.text);
        }
        if (piece.count == 0) continue;
      }
      InputArchive state;
      std::string key;
      if (is_known) {
        key = Read<std::string>(group, "params/" + std::to_string(index++));
        piece.first_place = first_places.emplace(key, place).first->second;
      }
      if (is_known && piece.first_place == place && states.try_read(key, state)) {
        for (auto& [name, value] : ItemsOf(state)) piece.state.emplace(name, std::move(value));
      }
      pieces.push_back(std::move(piece));
    }
    if (is_known && index != ReadCount(group, "params/size")) {
      throw std::runtime_error("group " + std::to_string(g) +
                               " has other parameters than its shards");
    }
  }
  return pieces;
}

std::vector<Piece> SavedOptimizer::Add(InputArchive& archive, bool keep) {
  std::vector<Piece> pieces = ReadPieces(archive, keep);
  for (const Piece& piece : pieces) {
    parameters_[piece.place].first_place = piece.first_place;
    ranges_[piece.place].emplace_back(piece.begin, piece.begin + piece.count);
    if (piece.state.empty()) continue;
    with_state_[piece.place] += piece.count;
    try {
      Merge(piece, keep);
    } catch (const std::exception& error) {
      throw std::runtime_error(parameters_[piece.place].text + ": " + error.what());
    }
  }
  return pieces;
}

void SavedOptimizer::Merge(const Piece& piece, bool keep) {
  Parameter& parameter = parameters_[piece.place];
  const bool is_first = parameter.state.empty();
  if (piece.count == parameter.numel) {
    if (keep) parameter.state = piece.state;
    return;
  }
  if (Kind().empty()) throw std::runtime_error("parts of it are known of LibTorch's classes alone");
  if (!is_first && !HasSameNames(piece.state, parameter.state)) {
    throw std::runtime_error("its shards have different kinds of state");
  }
  if (parameter.strides.empty() && parameter.sizes.size() > 1 && keep) {
    throw std::runtime_error(
        "its shards are of an earlier version of the library, which did not save how it lies in "
        "memory; load the checkpoint with its program and save it again");
  }
  for (const auto& [name, value] : piece.state) {
    c10::IValue& whole = parameter.state[name];
    if (!value.isTensor()) {
      if (!is_first && whole != value) throw std::runtime_error("its shards differ in " + name);
      whole = value;
      continue;
    }
    const at::Tensor& part = value.toTensor();
    if (part.dim() != 1 || part.numel() != piece.count) {
      throw std::runtime_error("the " + name + " of a shard has another size than the shard");
    }
    if (!keep) continue;
    if (is_first) {
      const std::vector<std::int64_t> flat = {1};
      whole = at::empty_strided(
          parameter.sizes, parameter.strides.empty() ? flat : parameter.strides, part.options());
    }
    const at::Tensor& tensor = whole.toTensor();
    if (static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.element_size()) !=
        parameter.numel) {
      throw std::runtime_error("its elements do not lie densely in memory");
    }
    tensor.as_strided({parameter.numel}, {1}).narrow(0, piece.begin, piece.count).copy_(part);
  }
}

void SavedOptimizer::Finish() const {
  for (std::size_t place = 0; place < parameters_.size(); ++place) {
    const Parameter& parameter = parameters_[place];
    auto ranges = ranges_[place];
    std::sort(ranges.begin(), ranges.end());
    std::int64_t end = 0;
    bool once = true;
    std::string text;
    for (const auto& [from, to] : ranges) {
      once = once && from == end;
      end = to;
      text += (text.empty() ? " " : ", ") + std::to_string(from) + " to " + std::to_string(to - 1);
    }
    if (!once || end != parameter.numel) {
      throw std::runtime_error(parameter.text + ": the shards have the elements" +
                               (text.empty() ? " none" : text) + ", instead of each of " +
                               std::to_string(parameter.numel) + " once");
    }
    if (with_state_[place] != 0 && with_state_[place] != parameter.numel) {
      throw std::runtime_error(parameter.text + ": " + std::to_string(with_state_[place]) +
                               " elements of " + std::to_string(parameter.numel) + " have state");
    }
  }
}

void SavedOptimizer::Write(OutputArchive& archive) const {
  // LibTorch takes the key for the address of the parameter, which is no null pointer.
  const auto key_of = [](std::size_t place) { return std::to_string(place + 1); };
  OutputArchive own(archive.compilation_unit());
  own.write("pytorch_version", c10::IValue("1.5.0"));  // what LibTorch's optimizers write
  OutputArchive states(archive.compilation_unit());
  std::int64_t count = 0;
  for (std::size_t place = 0; place < parameters_.size(); ++place) {
    if (parameters_[place].state.empty()) continue;
    OutputArchive state(archive.compilation_unit());
    for (const auto& [name, value] : parameters_[place].state) state.write(name, value);
    states.write(key_of(place), state);
    ++count;
  }
  own.write("state", states);
  OutputArchive groups(archive.compilation_unit());
  const auto write_count = [](OutputArchive& to, const std::string& key, std::size_t number) {
    to.write(key, at::tensor(static_cast<std::int64_t>(number)));
  };
  write_count(groups, "param_groups/size", groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    OutputArchive group(archive.compilation_unit());
    write_count(group, "params/size", groups_[g].places.size());
    for (std::size_t i = 0; i < groups_[g].places.size(); ++i) {
      const std::size_t place = groups_[g].places[i];
      group.write("params/" + std::to_string(i),
                  c10::IValue(key_of(parameters_[place].first_place)));
    }
    OutputArchive options(archive.compilation_unit());
    for (const auto& [name, value] : groups_[g].options) options.write(name, value);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(g), group);
  }
  own.write("param_groups", groups);
  archive.write("optimizer", own);
  archive.write("states", c10::IValue(count));
}

}  // namespace sirtaki::detail
