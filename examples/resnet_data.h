// The data of train_resnet: made-up images, or those of a folder, in batches.
#pragma once

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "images/folder.h"
#include "images/image.h"

namespace resnet {

// Random numbers that depend only on the seeds, on every machine.
class Random {
 public:
  Random(std::initializer_list<std::uint64_t> seeds) {
    std::seed_seq sequence(seeds.begin(), seeds.end());
    engine_.seed(sequence);
  }
  std::uint32_t bits() { return static_cast<std::uint32_t>(engine_()); }
  double between(double least, double most) { return least + (most - least) * (bits() * 0x1p-32); }

 private:
  std::mt19937 engine_;
};

// A source of images. Several threads read it at once.
class Source {
 public:
  virtual ~Source() = default;
  virtual std::size_t size() const = 0;
  virtual std::int64_t classes() const = 0;
  // Writes 3 planes of side * side normalised numbers, and returns the image's class. With `random`
  // the image is cut and mirrored at random, as in training; null: it is the same each time.
  virtual std::int64_t read(std::size_t index, int side, Random* random, float* planes) const = 0;
};

// Made-up images: waves under noise, whose direction and length depend on the class, so that there
// is something to learn.
class SyntheticSource : public Source {
 public:
  SyntheticSource(std::int64_t images, std::int64_t classes, std::int64_t seed)
      : images_(images), classes_(classes), seed_(static_cast<std::uint64_t>(seed)) {}

  std::size_t size() const override { return static_cast<std::size_t>(images_); }
  std::int64_t classes() const override { return classes_; }

  std::int64_t read(std::size_t index, int side, Random* random, float* planes) const override {
    const std::int64_t target = static_cast<std::int64_t>(index) % classes_;
    Random of_class({seed_, 1, static_cast<std::uint64_t>(target)});
    Random fixed({seed_, 2, index});
    std::uint32_t noise = (random != nullptr ? *random : fixed).bits();
    const auto pixels = static_cast<std::size_t>(side);
    for (int plane = 0; plane < examples::kColours; ++plane) {
      // sin(a + b) of sines and cosines along the edges: a sine a pixel would cost more than the
      // rest.
      const std::vector<double> across = wave(of_class, side);
      const std::vector<double> down = wave(of_class, side);
      for (std::size_t y = 0; y < pixels; ++y) {
        for (std::size_t x = 0; x < pixels; ++x) {
          noise = noise * 1664525u + 1013904223u;
          const double value = across[2 * x] * down[2 * y + 1] + across[2 * x + 1] * down[2 * y];
          *planes++ = static_cast<float>(value + (noise >> 8) * 0x1p-23 - 1);
        }
      }
    }
    return target;
  }

 private:
  // Sine and cosine of each place on an edge.
  static std::vector<double> wave(Random& random, int side) {
    const double step = random.between(0, 60) / side;
    const double phase = random.between(0, 6.3);
    std::vector<double> values;
    for (int i = 0; i < side; ++i) {
      values.push_back(std::sin(phase + step * i));
      values.push_back(std::cos(phase + step * i));
    }
    return values;
  }

  const std::int64_t images_;
  const std::int64_t classes_;
  const std::uint64_t seed_;
};

class FolderSource : public Source {
 public:
  explicit FolderSource(const std::string& folder) : images_(examples::list_images(folder)) {}

  std::size_t size() const override { return images_.files.size(); }
  std::int64_t classes() const override {
    return static_cast<std::int64_t>(images_.classes.size());
  }
  const std::vector<std::string>& class_names() const { return images_.classes; }
  // The names are every image's class and name, without the folder that they all are in.
  std::string names() const {
    std::string all;
    for (const auto& [path, target] : images_.files) {
      all += std::to_string(target) + path.substr(path.find_last_of('/')) + '\n';
    }
    return all;
  }

  std::int64_t read(std::size_t index, int side, Random* random, float* planes) const override {
    const auto& [path, target] = images_.files[index];
    const examples::Image image = examples::read_image(path);
    const examples::Box box = random != nullptr ? any_part(image, *random) : middle(image, 0.875);
    examples::resample(image, box, side, random != nullptr && random->bits() % 2 == 1, planes);
    return target;
  }

 private:
  // A square of this part of the shorter side.
  static examples::Box middle(const examples::Image& image, double part) {
    const double side = part * std::min(image.width, image.height);
    return {(image.width - side) / 2, (image.height - side) / 2, side, side};
  }

  // 8 to 100 % of the image's area, of a form from 3:4 to 4:3.
  static examples::Box any_part(const examples::Image& image, Random& random) {
    for (int attempt = 0; attempt < 10; ++attempt) {
      const double area = random.between(0.08, 1) * image.width * image.height;
      const double form = std::exp(random.between(std::log(3.0 / 4), std::log(4.0 / 3)));
      const double width = std::sqrt(area * form);
      const double height = std::sqrt(area / form);
      if (width > image.width || height > image.height) continue;
      const double x = random.between(0, image.width - width);
      return {x, random.between(0, image.height - height), width, height};
    }
    return middle(image, 1);
  }

  const examples::ImageFolder images_;
};

// Batches of a source, for torch::data's loaders, which give each of their threads a copy.
class Batches : public torch::data::datasets::BatchDataset<Batches, torch::data::Example<>> {
 public:
  struct Options {
    int side = 224;
    bool training = false;
    std::int64_t seed = 0;
    std::int64_t epoch = 0;
    bool pinned = false;  // in memory that a GPU copies from while the host goes on
  };
  Batches(std::shared_ptr<const Source> source, const Options& options)
      : source_(std::move(source)), options_(options) {}

  torch::data::Example<> get_batch(torch::ArrayRef<std::size_t> indices) override {
    const auto count = static_cast<std::int64_t>(indices.size());
    const auto where = torch::TensorOptions().pinned_memory(options_.pinned);
    torch::Tensor images =
        torch::empty({count, examples::kColours, options_.side, options_.side}, where);
    torch::Tensor targets = torch::empty({count}, where.dtype(torch::kLong));
    auto* planes = images.data_ptr<float>();
    const auto pixels = static_cast<std::size_t>(options_.side) * options_.side;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      Random random({static_cast<std::uint64_t>(options_.seed), 3,
                     static_cast<std::uint64_t>(options_.epoch), indices[i]});
      targets.data_ptr<std::int64_t>()[i] =
          source_->read(indices[i], options_.side, options_.training ? &random : nullptr, planes);
      planes += pixels * examples::kColours;
    }
    return {images, targets};
  }
  torch::optional<std::size_t> size() const override { return source_->size(); }

 private:
  std::shared_ptr<const Source> source_;
  Options options_;
};

}  // namespace resnet
