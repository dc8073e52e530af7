// The data of train_digits: reading it, and splitting it into training and test samples.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace digits {

constexpr int kSide = 8;
constexpr int kPixels = kSide * kSide;
constexpr int kMaxPixel = 16;
constexpr int kClasses = 10;

// data/digits.csv of the examples: beside the program, in a folder above it (a build folder lies in
// the source tree), or above the current one.
inline std::string find_data() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  for (const fs::path& start : {program.parent_path(), fs::current_path(error)}) {
    for (fs::path folder = start; !folder.empty(); folder = folder.parent_path()) {
      for (const char* name : {"data/digits.csv", "examples/data/digits.csv"}) {
        if (fs::is_regular_file(folder / name, error)) return (folder / name).string();
      }
      if (folder == folder.parent_path()) break;
    }
  }
  // No UsageError: perhaps only this host lacks the file.
  throw std::runtime_error(
      "data/digits.csv was not found near the program; give it with --data FILE");
}

struct Sample {
  std::vector<float> pixels;
  std::int64_t digit = 0;
};

inline Sample parse_line(const std::string& line, const std::string& where) {
  Sample sample;
  const char* at = line.c_str();
  for (int field = 0; field <= kPixels; ++field) {
    const bool is_class = field == kPixels;
    const int limit = is_class ? kClasses - 1 : kMaxPixel;
    char* end = nullptr;
    const long value = std::strtol(at, &end, 10);
    const char after = is_class ? '\0' : ',';
    if (end == at || value < 0 || value > limit || (*end != after && !(is_class && *end == '\r'))) {
      throw std::runtime_error(where + "field " + std::to_string(field + 1) + " of 65 is not " +
                               (is_class ? "a class from 0 to 9 that ends the line"
                                         : "a pixel from 0 to 16 with a comma behind it"));
    }
    if (is_class) {
      sample.digit = value;
    } else {
      sample.pixels.push_back(static_cast<float>(value) / kMaxPixel);
    }
    at = end + 1;
  }
  return sample;
}

inline std::vector<Sample> read_samples(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": cannot be opened: " + std::strerror(errno));
  std::vector<Sample> samples;
  std::string line;
  int blank = 0;  // a line without anything: allowed at the end only
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.empty() || line == "\r") {
      if (blank == 0) blank = number;
      continue;
    }
    if (blank != 0) (void)parse_line("", path + ":" + std::to_string(blank) + ": ");
    samples.push_back(parse_line(line, path + ":" + std::to_string(number) + ": "));
  }
  if (file.bad()) throw std::runtime_error(path + ": cannot be read: " + std::strerror(errno));
  if (samples.empty()) throw std::runtime_error(path + ": holds no sample");
  return samples;
}

class Digits : public torch::data::datasets::Dataset<Digits> {
 public:
  explicit Digits(const std::vector<Sample>& samples)
      : images_(torch::empty({static_cast<std::int64_t>(samples.size()), 1, kSide, kSide})),
        classes_(torch::empty({static_cast<std::int64_t>(samples.size())}, torch::kLong)) {
    for (std::size_t i = 0; i < samples.size(); ++i) {
      std::copy(samples[i].pixels.begin(), samples[i].pixels.end(),
                images_.data_ptr<float>() + i * kPixels);
      classes_.data_ptr<std::int64_t>()[i] = samples[i].digit;
    }
  }

  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {images_[i], classes_[i]};
  }
  torch::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(images_.size(0));
  }
  const torch::Tensor& images() const { return images_; }
  const torch::Tensor& classes() const { return classes_; }

 private:
  torch::Tensor images_;
  torch::Tensor classes_;
};

// A fifth of each class is held out for the test. The same split on every rank: it depends on the
// seed.
inline std::pair<Digits, Digits> split(std::vector<Sample> samples, std::int64_t seed) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  std::shuffle(samples.begin(), samples.end(), random);
  std::vector<Sample> train;
  std::vector<Sample> test;
  std::vector<int> seen(kClasses);
  for (Sample& sample : samples) {
    const bool held_out = seen[static_cast<std::size_t>(sample.digit)]++ % 5 == 0;
    (held_out ? test : train).push_back(std::move(sample));
  }
  return {Digits(train), Digits(test)};
}

}  // namespace digits
